"""One pass of list scheduling: from a case and a rule to the order in which each worker runs its actions."""

from __future__ import annotations

import math
import random
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.plan.turns import Turns
from culm.schedule import Action, Kind

if TYPE_CHECKING:
    from culm.plan.failures import Case

Row: TypeAlias = list[int]
"""What a worker runs, in order, each action as 3 x micro-batch + F, BACK or W.

Plain numbers, because a plan for a thousand workers has hundreds of thousands of them.
"""

F, BACK, W = range(3)

_Queue: TypeAlias = list[tuple[float, int]]
"""A heap of (arrival, rank), what is still on the way included."""


class Rule(NamedTuple):
    """What a free worker takes when it could take several things. W always comes last: nobody waits for it."""

    prefer: Literal["backward", "forward", "turns"]
    """The kind to take first; in turns, as in 1F1B, a forward after a backward and a backward after a forward."""
    ahead: int | None
    """How many more forwards than 1F1B has a worker may be ahead of its backwards. None: any number."""
    orphans: Literal["first", "last", "equal"]
    """When to take those of a failed peer: before one's own, after them, or as they come."""
    shuffle: int = 0
    """The seed of another order of the micro-batches; if it is even, orphans are dealt out beforehand too. 0: none.

    Only for cases with failures: otherwise sums keep the micro-batches in order.
    """


class Lists(NamedTuple):
    """What a pass made: the lists of all workers by slot number, without R and S, and the dry run that made them."""

    rows: list[Row]
    turns: Turns


def arrange(case: Case, rule: Rule) -> Lists:
    """The lists of one pass; those of failed slots are empty.

    Never ends in a deadlock, however small the cap: the last stage can always finish what it has begun, so the one
    before it can, and so on.
    """
    made = _Pass(case, rule)
    made.run()
    return Lists(made.rows, made.turns)


def listed(case: Case, slot: int, row: Row) -> tuple[Action, ...]:
    """What a worker runs as actions, with R and S at the end; nothing for a slot that has failed."""
    if not row:
        return ()
    stage, kinds = slot % case.stages, (Kind.F, case.backward, Kind.W)
    new = tuple.__new__  # twice as fast as the constructor
    run = [new(Action, (stage, kinds[code % 3], code // 3)) for code in row]
    return (*run, Action(stage, Kind.R), Action(stage, Kind.S))


class _Pass:
    """A simulation of the step. Whoever is free looks for something to do; what is sent is known when it is sent.

    Everything is in flat lists, by slot number or by [stage][micro-batch], and the loop is one function: it runs
    hundreds of thousands of times in a large plan.
    """

    def __init__(self, case: Case, rule: Rule) -> None:
        self.case, self.rule = case, rule
        M = case.micro_batches
        alive = [[d * case.stages + stage for d in case.live(stage)] for stage in range(case.stages)]
        self.turns = Turns(case.stages, alive, [case.prices[Kind.R][s] + case.prices[Kind.S][s] for s in self._stages])
        self.rows: list[Row] = [[] for _ in range(case.pipelines * case.stages)]
        self.runner = [self._owners(stage) for stage in self._stages]
        """By stage and micro-batch: who runs it; -1 as long as it is an orphan that nobody has taken."""
        load = [case.load(stage) for stage in self._stages]
        self.places = [load[stage] - len(block) for block in case.blocks for stage in self._stages]
        """How many orphans a worker may still take: then all peers end up with as even a load as can be."""
        self.rank = [M * index + block[index] for block in case.blocks for index in range(len(block))]
        """Micro-batches that arrive together are taken by their index in their own pipelines."""
        if rule.shuffle and case.failed:
            self._shuffle(random.Random(rule.shuffle), deal=rule.shuffle % 2 == 0)

    def _shuffle(self, chance: random.Random, deal: bool) -> None:
        """Another order of the micro-batches; and if asked for, orphans given to peers before they arrive."""
        M, P = self.case.micro_batches, self.case.stages
        order = chance.sample(range(M), M)
        self.rank = [M * order[micro] + micro for micro in range(M)]
        for stage in self._stages if deal else ():
            peers = [w for w in self.turns.live[stage] for _ in range(self.places[w])]
            orphans = [micro for micro, worker in enumerate(self.runner[stage]) if worker < 0]
            for micro, worker in zip(orphans, chance.sample(peers, len(peers)), strict=False):
                self.runner[stage][micro] = worker
            for worker in range(stage, len(self.places), P):
                self.places[worker] = 0

    @property
    def _stages(self) -> range:
        return range(self.case.stages)

    def _owners(self, stage: int) -> list[int]:
        P, live = self.case.stages, set(self.case.live(stage))
        return [d * P + stage if d in live else -1 for d, block in enumerate(self.case.blocks) for _ in block]

    def _most_open(self, stage: int) -> int:
        return self.case.micro_batches if self.rule.ahead is None else self.case.stages - stage + self.rule.ahead

    def run(self) -> None:  # noqa: PLR0912, PLR0915 (one loop: a call for each step of it would double its time)
        """Let time pass until nobody has anything left to do; `rows` and `turns` say what was done."""
        case, rule, rows, places, runner = self.case, self.rule, self.rows, self.places, self.runner
        P, M, split, last_stage = case.stages, case.micro_batches, case.split, case.stages - 1
        price = [case.prices[kind] for kind in (Kind.F, case.backward, Kind.W)]
        sends, peers, rank = case.sends, self.turns.live, self.rank
        cap, most_open = [case.cap(s) for s in self._stages], [self._most_open(s) for s in self._stages]
        turns, forward_first, orphans_first = rule.prefer == "turns", rule.prefer == "forward", rule.orphans == "first"
        by_arrival = rule.orphans == "equal"
        made = [[[-1] * M for _ in self._stages] for _ in (F, BACK)]
        note_worker, note_needs = self.turns.workers.append, self.turns.needs.append
        note_lag, note_price, turn = self.turns.lags.append, self.turns.prices.append, 0

        forwards: list[_Queue] = [[] for _ in rows]
        backwards: list[_Queue] = [[] for _ in rows]
        orphans: list[_Queue] = [[] for _ in self._stages]
        weights: list[deque[int]] = [deque() for _ in rows]
        alive, opened, last = [0] * len(rows), [0] * len(rows), [F] * len(rows)
        busy, wake = [0.0] * len(rows), [math.inf] * len(rows)
        wakes: list[tuple[float, int, int]] = []

        def tell(worker: int, arrival: float) -> None:
            """An idle worker looks up when something arrives; a busy one will when it is done."""
            if busy[worker] <= now and arrival < wake[worker]:
                wake[worker] = arrival
                heappush(wakes, (arrival, -places[worker], worker))

        def forward_comes(arrival: float, stage: int, micro: int) -> None:
            worker = runner[stage][micro]
            if worker >= 0:
                heappush(forwards[worker], (arrival, rank[micro]))
                tell(worker, arrival)
                return
            heappush(orphans[stage], (arrival, rank[micro]))
            for peer in peers[stage]:
                if places[peer]:
                    tell(peer, arrival)

        now = 0.0
        for micro in range(M):
            forward_comes(0.0, 0, micro)
        while wakes:
            now, _, worker = heappop(wakes)
            if now != wake[worker]:
                continue
            stage = worker % P
            mine, back, others = forwards[worker], backwards[worker], orphans[stage]
            queue: _Queue | None = None
            can_back = bool(back) and back[0][0] <= now
            if alive[worker] < cap[stage] and opened[worker] < most_open[stage]:
                if mine and mine[0][0] <= now:
                    queue = mine
                adoptable = places[worker] and others and others[0][0] <= now
                if adoptable and (queue is None or orphans_first or (by_arrival and others[0] < mine[0])):
                    queue = others
                if can_back and not (last[worker] != F if turns else forward_first):
                    queue = None
            if queue is not None:
                micro = heappop(queue)[1] % M
                if queue is others:
                    places[worker] -= 1
                    runner[stage][micro] = worker
                kind = F
            elif can_back:
                micro, kind = heappop(back)[1] % M, BACK
            elif weights[worker]:
                micro, kind = weights[worker].popleft(), W
            else:
                # What has arrived and was not taken waits for memory, and so for another action of this worker.
                coming = [heap[0][0] for heap in (back, mine, others) if heap and heap[0][0] > now]
                wake[worker] = min(coming, default=math.inf)
                if coming:
                    heappush(wakes, (wake[worker], -places[worker], worker))
                continue
            spent = price[kind][stage]
            busy[worker] = wake[worker] = end = now + spent
            heappush(wakes, (end, -places[worker], worker))
            rows[worker].append(3 * micro + kind)
            last[worker] = kind
            needs, lag = -1, 0.0
            if kind == F:
                alive[worker] += 1
                opened[worker] += 1
                made[F][stage][micro] = turn
                if stage:
                    needs, lag = made[F][stage - 1][micro], sends[stage - 1]
                if stage < last_stage:
                    forward_comes(end + sends[stage], stage + 1, micro)
                else:
                    heappush(back, (end, rank[micro]))
            elif kind == BACK:
                opened[worker] -= 1
                if split:
                    weights[worker].append(micro)
                else:
                    alive[worker] -= 1
                made[BACK][stage][micro] = turn
                if stage < last_stage:
                    needs, lag = made[BACK][stage + 1][micro], sends[stage]
                if stage:
                    arrival, target = end + sends[stage - 1], runner[stage - 1][micro]
                    heappush(backwards[target], (arrival, rank[micro]))
                    tell(target, arrival)
            else:
                alive[worker] -= 1
            note_worker(worker)
            note_needs(needs)
            note_lag(lag)
            note_price(spent)
            turn += 1
