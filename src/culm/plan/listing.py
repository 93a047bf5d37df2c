"""One pass of list scheduling: from a case and a rule to the order in which each worker runs its actions."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from culm.plan.failures import Slot
from culm.schedule import Action, Kind

if TYPE_CHECKING:
    from culm.plan.failures import Case

_Queue: TypeAlias = list[tuple[tuple[float, ...], int]]
"""A heap of micro-batches, each behind what it is ordered by."""


class Rule(NamedTuple):
    """What a free worker takes when it could take several things. W always comes last: nobody waits for it."""

    prefer: Literal["backward", "forward", "turns"]
    """The kind to take first; in turns, as in 1F1B, a forward after a backward and a backward after a forward."""
    ahead: int | None
    """How many more forwards than 1F1B has a worker may be ahead of its backwards. None: any number."""
    queue: Literal["index", "arrival"]
    """Which micro-batch of a queue: that with the lowest number in its own pipeline, or that which came first."""
    orphans: Literal["first", "last", "equal"]
    """When to take those of a failed peer: before one's own, after them, or as the queue says."""


class _Worker:
    """A live worker in the midst of a pass."""

    def __init__(self, case: Case, slot: Slot, rule: Rule) -> None:
        self.slot = slot
        self.forwards: _Queue = []
        self.backwards: _Queue = []
        self.weights: deque[int] = deque()
        self.actions: list[Action] = []
        self.busy = False
        self.alive = 0
        """Activations: F done, and W not."""
        self.open = 0
        """Forwards ahead of the backwards."""
        self.places = case.load(slot.stage) - len(case.blocks[slot.pipeline])
        """How many orphans it may still take: then all peers end up with as even a load as can be."""
        self.most_alive = case.cap(slot.stage)
        self.most_open = case.micro_batches if rule.ahead is None else case.stages - slot.stage + rule.ahead

    @property
    def has_room(self) -> bool:
        return self.alive < self.most_alive and self.open < self.most_open


def arrange(case: Case, rule: Rule) -> tuple[tuple[Action, ...], ...]:
    """The lists of all workers by slot number, without R and S; those of failed slots are empty.

    Never ends in a deadlock, however small the cap: the last stage can always finish what it has begun, so the one
    before it can, and so on.
    """
    return _Pass(case, rule).run()


class _Pass:
    """A simulation of the step. Events are (time, number, stage, kind, who): that an F or backward of a micro-batch
    became possible in a stage, or, with kind W, that the worker of a pipeline became free."""

    def __init__(self, case: Case, rule: Rule) -> None:
        self.case, self.rule = case, rule
        self.home = [(pipeline, index) for pipeline, block in enumerate(case.blocks) for index in range(len(block))]
        self.peers = [
            {pipeline: _Worker(case, Slot(pipeline, stage), rule) for pipeline in case.live(stage)}
            for stage in range(case.stages)
        ]
        self.orphans: list[_Queue] = [[] for _ in range(case.stages)]
        self.runner: list[dict[int, _Worker]] = [{} for _ in range(case.stages)]
        self.numbers = count()
        self.events: list[tuple[float, int, int, Kind, int]] = []

    def run(self) -> tuple[tuple[Action, ...], ...]:
        for micro in range(self.case.micro_batches):
            self._tell(0.0, 0, Kind.F, micro)
        while self.events:
            now = self.events[0][0]
            stages = set()
            while self.events and self.events[0][0] == now:
                _, _, stage, kind, who = heappop(self.events)
                self._note(now, stage, kind, who)
                stages.add(stage)
            for stage in stages:
                self._dispatch(stage, now)
        lists = [self.peers[s].get(d) for d in range(self.case.pipelines) for s in range(self.case.stages)]
        return tuple(tuple(worker.actions) if worker else () for worker in lists)

    def _tell(self, time: float, stage: int, kind: Kind, who: int) -> None:
        heappush(self.events, (time, next(self.numbers), stage, kind, who))

    def _note(self, now: float, stage: int, kind: Kind, who: int) -> None:
        if kind is Kind.W:
            self.peers[stage][who].busy = False
            return
        pipeline, index = self.home[who]
        if kind is not Kind.F:
            queue = self.runner[stage][who].backwards
        elif pipeline in self.peers[stage]:
            queue = self.peers[stage][pipeline].forwards
        else:
            queue = self.orphans[stage]
        heappush(queue, ((index,) if self.rule.queue == "index" else (now, index), who))

    def _dispatch(self, stage: int, now: float) -> None:
        """Give every free worker of a stage something to do; who has taken the fewest orphans chooses first."""
        free = [worker for worker in self.peers[stage].values() if not worker.busy]
        for worker in sorted(free, key=lambda worker: -worker.places):
            chosen = self._choose(worker)
            if chosen is not None:
                self._start(worker, *chosen, now)

    def _choose(self, worker: _Worker) -> tuple[Kind, int] | None:
        forward = self._forwards(worker) if worker.has_room else None
        if forward is not None and (not worker.backwards or self._forward_first(worker)):
            return Kind.F, self._take(worker, forward)
        if worker.backwards:
            return self.case.backward, heappop(worker.backwards)[1]
        return (Kind.W, worker.weights.popleft()) if worker.weights else None

    def _forward_first(self, worker: _Worker) -> bool:
        if self.rule.prefer == "turns":
            return bool(worker.actions) and worker.actions[-1].kind is not Kind.F
        return self.rule.prefer == "forward"

    def _forwards(self, worker: _Worker) -> _Queue | None:
        """The queue that the next forward comes out of, if there is any."""
        mine, orphans = worker.forwards, self.orphans[worker.slot.stage]
        if not orphans or not worker.places:
            return mine or None
        if not mine or self.rule.orphans == "first":
            return orphans
        return orphans if self.rule.orphans == "equal" and orphans[0] < mine[0] else mine

    def _take(self, worker: _Worker, queue: _Queue) -> int:
        micro = heappop(queue)[1]
        worker.places -= queue is not worker.forwards
        self.runner[worker.slot.stage][micro] = worker
        return micro

    def _start(self, worker: _Worker, kind: Kind, micro: int, now: float) -> None:
        stage = worker.slot.stage
        end = now + self.case.prices[kind][stage]
        worker.actions.append(Action(stage, kind, micro))
        worker.busy = True
        worker.alive += (kind is Kind.F) - (kind in (Kind.W, Kind.B))
        worker.open += (kind is Kind.F) - (kind is self.case.backward)
        if kind is Kind.I:
            worker.weights.append(micro)
        if kind is Kind.F:
            self._forward_done(end, stage, micro)
        elif kind is self.case.backward and stage:
            self._tell(end + self.case.sends[stage - 1], stage - 1, kind, micro)
        self._tell(end, stage, Kind.W, worker.slot.pipeline)

    def _forward_done(self, end: float, stage: int, micro: int) -> None:
        if stage == self.case.stages - 1:
            self._tell(end, stage, self.case.backward, micro)
        else:
            self._tell(end + self.case.sends[stage], stage + 1, Kind.F, micro)
