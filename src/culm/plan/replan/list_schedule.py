"""One pass of list scheduling: from a case and a priority rule to the order in which each worker runs its actions."""

from __future__ import annotations

import math
import random
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.plan.replan.fast_timing import FlatDryRun
from culm.schedule import Action, Kind

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase

EncodedRow: TypeAlias = list[int]
"""The actions of a worker, in order, each encoded as 3 x micro-batch + F, BACKWARD or W.

Integers, because a plan for a thousand workers has hundreds of thousands of actions.
"""

F, BACKWARD, W = range(3)

_Queue: TypeAlias = list[tuple[float, int]]
"""A heap of (arrival time, rank), including tensors that are still being sent."""


class PriorityRule(NamedTuple):
    """Which action a free worker runs if several are ready. W always comes last, because no worker waits for it."""

    preferred_kind: Literal["backward", "forward", "turns"]
    """The kind to run first; "turns" alternates, as in 1F1B: a forward after a backward, a backward after a forward."""
    max_lead: int | None
    """How many more forwards than in 1F1B a worker may run ahead of its backwards. None: no limit."""
    orphan_order: Literal["first", "last", "equal"]
    """When to run micro-batches of a failed peer: before the worker's own, after them, or in order of arrival."""
    shuffle_seed: int = 0
    """Seed of another order of the micro-batches; an even seed also assigns orphans in advance. 0: no shuffling.

    Only for cases with failures: without failures, gradients are summed in micro-batch order.
    """


class ListSchedule(NamedTuple):
    """Result of a pass: the lists of all workers by slot number, without R and S, and their dry run."""

    rows: list[EncodedRow]
    dry_run: FlatDryRun


def build_list_schedule(case: PlanCase, rule: PriorityRule) -> ListSchedule:
    """Run one pass; the lists of failed slots are empty.

    Cannot deadlock, however small the activation limit: the last stage can always finish what it has started, hence
    so can the stage before it, and so on.
    """
    scheduler = _ListScheduler(case, rule)
    scheduler.run()
    return ListSchedule(scheduler.rows, scheduler.dry_run)


def decode_actions(case: PlanCase, slot: int, row: EncodedRow) -> tuple[Action, ...]:
    """A worker's actions with R and S at the end; empty for a failed slot."""
    if not row:
        return ()
    stage, kinds = slot % case.stages, (Kind.F, case.backward_kind, Kind.W)
    new = tuple.__new__  # takes half the time of the constructor
    run = [new(Action, (stage, kinds[code % 3], code // 3)) for code in row]
    return (*run, Action(stage, Kind.R), Action(stage, Kind.S))


class _ListScheduler:
    """Simulation of the step: every free worker looks for an action to run; a send schedules its arrival time.

    All state is in flat lists, by slot number or by [stage][micro-batch], and the loop is one function, because a large
    plan takes hundreds of thousands of iterations.
    """

    def __init__(self, case: PlanCase, rule: PriorityRule) -> None:
        self.case, self.rule = case, rule
        M = case.micro_batches
        alive = [[d * case.stages + stage for d in case.live_pipelines(stage)] for stage in range(case.stages)]
        self.dry_run = FlatDryRun(
            case.stages, alive, [case.action_costs[Kind.R][s] + case.action_costs[Kind.S][s] for s in self._stages]
        )
        self.rows: list[EncodedRow] = [[] for _ in range(case.pipelines * case.stages)]
        self.runner = [self._initial_runners(stage) for stage in self._stages]
        """By stage and micro-batch: the worker that runs it; -1 for an orphan that no worker has taken yet."""
        load = [case.max_micros_per_worker(stage) for stage in self._stages]
        self.orphan_quota = [load[stage] - len(block) for block in case.micros_by_pipeline for stage in self._stages]
        """How many orphans a worker may still take. The quotas make the load of all peers as even as possible."""
        self.priority = [M * index + block[index] for block in case.micros_by_pipeline for index in range(len(block))]
        """Micro-batches that arrive together are ordered by their index within their own pipeline."""
        if rule.shuffle_seed and case.failed:
            self._shuffle(random.Random(rule.shuffle_seed), assign_orphans=rule.shuffle_seed % 2 == 0)

    def _shuffle(self, rng: random.Random, assign_orphans: bool) -> None:
        """Shuffle the order of the micro-batches and, with `assign_orphans`, assign orphans to peers in advance."""
        M, P = self.case.micro_batches, self.case.stages
        order = rng.sample(range(M), M)
        self.priority = [M * order[micro] + micro for micro in range(M)]
        for stage in self._stages if assign_orphans else ():
            peers = [w for w in self.dry_run.live_workers[stage] for _ in range(self.orphan_quota[w])]
            orphans = [micro for micro, worker in enumerate(self.runner[stage]) if worker < 0]
            for micro, worker in zip(orphans, rng.sample(peers, len(peers)), strict=False):
                self.runner[stage][micro] = worker
            for worker in range(stage, len(self.orphan_quota), P):
                self.orphan_quota[worker] = 0

    @property
    def _stages(self) -> range:
        return range(self.case.stages)

    def _initial_runners(self, stage: int) -> list[int]:
        P, live = self.case.stages, set(self.case.live_pipelines(stage))
        return [
            d * P + stage if d in live else -1 for d, block in enumerate(self.case.micros_by_pipeline) for _ in block
        ]

    def _max_open_forwards(self, stage: int) -> int:
        return self.case.micro_batches if self.rule.max_lead is None else self.case.stages - stage + self.rule.max_lead

    def run(self) -> None:  # noqa: PLR0912, PLR0915 (one loop: function calls would double its time)
        """Simulate until no worker has anything left to run. Fills `rows` and `dry_run`."""
        case, rule, rows, quota, runner = self.case, self.rule, self.rows, self.orphan_quota, self.runner
        P, M, split, last_stage = case.stages, case.micro_batches, case.split, case.stages - 1
        price = [case.action_costs[kind] for kind in (Kind.F, case.backward_kind, Kind.W)]
        sends, peers, rank = case.send_costs, self.dry_run.live_workers, self.priority
        cap, most_open = (
            [case.max_activations(s) for s in self._stages],
            [self._max_open_forwards(s) for s in self._stages],
        )
        alternate, forward_first, orphans_first = (
            rule.preferred_kind == "turns",
            rule.preferred_kind == "forward",
            rule.orphan_order == "first",
        )
        by_arrival = rule.orphan_order == "equal"
        index_of = [[[-1] * M for _ in self._stages] for _ in (F, BACKWARD)]
        append_worker, append_producer = self.dry_run.workers.append, self.dry_run.producers.append
        append_delay, append_duration, index = self.dry_run.send_delays.append, self.dry_run.durations.append, 0

        forwards: list[_Queue] = [[] for _ in rows]
        backwards: list[_Queue] = [[] for _ in rows]
        orphans: list[_Queue] = [[] for _ in self._stages]
        weights: list[deque[int]] = [deque() for _ in rows]
        alive, opened, last = [0] * len(rows), [0] * len(rows), [F] * len(rows)
        busy, wake = [0.0] * len(rows), [math.inf] * len(rows)
        wakes: list[tuple[float, int, int]] = []

        def wake_at(worker: int, arrival: float) -> None:
            """Wake an idle worker when a tensor arrives. A busy worker checks again when it has finished."""
            if busy[worker] <= now and arrival < wake[worker]:
                wake[worker] = arrival
                heappush(wakes, (arrival, -quota[worker], worker))

        def add_forward(arrival: float, stage: int, micro: int) -> None:
            worker = runner[stage][micro]
            if worker >= 0:
                heappush(forwards[worker], (arrival, rank[micro]))
                wake_at(worker, arrival)
                return
            heappush(orphans[stage], (arrival, rank[micro]))
            for peer in peers[stage]:
                if quota[peer]:
                    wake_at(peer, arrival)

        now = 0.0
        for micro in range(M):
            add_forward(0.0, 0, micro)
        while wakes:
            now, _, worker = heappop(wakes)
            if now != wake[worker]:
                continue
            stage = worker % P
            own, back, others = forwards[worker], backwards[worker], orphans[stage]
            queue: _Queue | None = None
            can_back = bool(back) and back[0][0] <= now
            if alive[worker] < cap[stage] and opened[worker] < most_open[stage]:
                if own and own[0][0] <= now:
                    queue = own
                can_adopt = quota[worker] and others and others[0][0] <= now
                if can_adopt and (queue is None or orphans_first or (by_arrival and others[0] < own[0])):
                    queue = others
                if can_back and not (last[worker] != F if alternate else forward_first):
                    queue = None
            if queue is not None:
                micro = heappop(queue)[1] % M
                if queue is others:
                    quota[worker] -= 1
                    runner[stage][micro] = worker
                kind = F
            elif can_back:
                micro, kind = heappop(back)[1] % M, BACKWARD
            elif weights[worker]:
                micro, kind = weights[worker].popleft(), W
            else:
                # Tensors that arrived but were not taken wait for memory, that is, for another action of this worker.
                coming = [heap[0][0] for heap in (back, own, others) if heap and heap[0][0] > now]
                wake[worker] = min(coming, default=math.inf)
                if coming:
                    heappush(wakes, (wake[worker], -quota[worker], worker))
                continue
            duration = price[kind][stage]
            busy[worker] = wake[worker] = end = now + duration
            heappush(wakes, (end, -quota[worker], worker))
            rows[worker].append(3 * micro + kind)
            last[worker] = kind
            needs, delay = -1, 0.0
            if kind == F:
                alive[worker] += 1
                opened[worker] += 1
                index_of[F][stage][micro] = index
                if stage:
                    needs, delay = index_of[F][stage - 1][micro], sends[stage - 1]
                if stage < last_stage:
                    add_forward(end + sends[stage], stage + 1, micro)
                else:
                    heappush(back, (end, rank[micro]))
            elif kind == BACKWARD:
                opened[worker] -= 1
                if split:
                    weights[worker].append(micro)
                else:
                    alive[worker] -= 1
                index_of[BACKWARD][stage][micro] = index
                if stage < last_stage:
                    needs, delay = index_of[BACKWARD][stage + 1][micro], sends[stage]
                if stage:
                    arrival, target = end + sends[stage - 1], runner[stage - 1][micro]
                    heappush(backwards[target], (arrival, rank[micro]))
                    wake_at(target, arrival)
            else:
                alive[worker] -= 1
            append_worker(worker)
            append_producer(needs)
            append_delay(delay)
            append_duration(duration)
            index += 1
