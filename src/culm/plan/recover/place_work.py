"""List scheduling of any set of work items on any set of holders: the rest of a step after a loss, or a whole step on
workers that replace others. A free worker runs the best action that it can start: of the older step first, then what
another segment waits for, and W last; or, by the second rule, the action with the longest chain of dependent actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from typing import TypeAlias

from culm.plan.recover.balance_work import balance_items, possible_runners
from culm.plan.recover.compact_schedule import compact_schedule
from culm.plan.recover.lineage import WorkItem, WorkKey
from culm.plan.recover.recovery_bound import RecoveryBound
from culm.plan.recover.task_dependencies import StepTask
from culm.schedule import UNIT_COSTS, Action, Costs, Kind
from culm.schedule.plan_timing import action_costs, send_costs

_KIND_PRIORITY = {Kind.I: 0, Kind.B: 0, Kind.F: 1, Kind.W: 2}
_QueueEntry: TypeAlias = tuple[tuple[float, ...], int]
"""The sort key of a task, and the index of its item."""
_TensorKey: TypeAlias = tuple[WorkKey, bool]
"""An input from another segment: (key, whether it is the output of F)."""


@dataclass(frozen=True, kw_only=True)
class RunnerPool:
    """The workers on which work can be placed."""

    stages: int
    segments: int
    worker_count: int
    runners: Mapping[int, Sequence[int]]
    """By stage: the workers that add to its sums."""
    other_holders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """By stage: further holders, which can run actions of which only the output is needed."""
    leaving_workers: Collection[int] = ()
    """Workers that run only items whose tapes they hold."""
    costs: Costs = UNIT_COSTS
    synchronous_step: bool = False
    """Whether a step ends for all stages together, because gradients are clipped by the global norm."""
    slow_workers: Mapping[int, float] = field(default_factory=dict)
    """By slow worker: how many times as long as the costs it takes."""
    max_lead: int | None = None
    """How many more forwards than in 1F1B a worker may run ahead of its backwards in a segment; None: no limit."""


@dataclass(frozen=True)
class Placement:
    """Task lists by worker, and when all of them are finished."""

    task_lists: tuple[tuple[StepTask, ...], ...]
    makespan: float


def place_items(
    items: Sequence[WorkItem],
    pool: RunnerPool,
    default_runners: Mapping[tuple[int, int], int] | None = None,
    *,
    longest_chain_first: bool = False,
) -> Placement:
    """Assign every item to a worker that may run it, in an order that cannot deadlock.

    `default_runners` names, by (segment, micro-batch), the worker of items that are not bound to a tape.
    `longest_chain_first` prefers the action with the longest chain of dependent actions.
    """
    return _PlacementPass(
        _PlacementInputs(items, pool), _default_runner_by_item(items, default_runners or {}), longest_chain_first
    ).run()


_NO_BOUND = RecoveryBound()
_MANY_ACTIONS = 1_500
"""With more actions only the three best placements are compacted, because each takes tenths of a second."""


def best_placement(
    items: Sequence[WorkItem],
    pool: RunnerPool,
    default_runners: Mapping[tuple[int, int], int],
    bound: RecoveryBound = _NO_BOUND,
) -> Placement:
    """The shortest of several passes, each with both rules: with default runners where the worker belongs to the stage,
    without default runners, and with the work balanced in advance; then these once more, compacted. Returns the first
    of equals, and stops once a placement meets the bound."""
    own_stage_runners = {
        key: worker for key, worker in default_runners.items() if worker % pool.stages == key[0] % pool.stages
    }
    placements: list[Placement] = []
    for placement in _candidate_placements(items, pool, own_stage_runners, bound, placements):
        placements.append(placement)
        if placement.makespan <= bound.makespan + 1e-9:
            break
    return min(placements, key=lambda placement: placement.makespan)


def _candidate_placements(
    items: Sequence[WorkItem],
    pool: RunnerPool,
    own_stage_runners: Mapping[tuple[int, int], int],
    bound: RecoveryBound,
    placements: Sequence[Placement],
) -> Iterator[Placement]:
    inputs = _PlacementInputs(items, pool)
    tried: list[dict[WorkItem, int]] = []
    for variant in ("own", "anywhere", "divided"):
        runner_by_item = (
            _default_runner_by_item(items, own_stage_runners)
            if variant == "own"
            else balance_items(items, pool, bound.min_idle)
            if variant == "divided"
            else {}
        )
        for longest_chain_first in (False, True) if runner_by_item not in tried else ():
            yield _PlacementPass(inputs, runner_by_item, longest_chain_first).run()
        tried.append(runner_by_item)
    by_makespan = sorted(placements, key=lambda placement: placement.makespan)
    many = sum(len(item.kinds) for item in items) > _MANY_ACTIONS
    for lists in dict.fromkeys(placement.task_lists for placement in by_makespan[: 3 if many else None]):
        yield Placement(*compact_schedule(lists, pool, bound.makespan))


def _default_runner_by_item(
    items: Sequence[WorkItem], default_runners: Mapping[tuple[int, int], int]
) -> dict[WorkItem, int]:
    return {
        item: default_runners[item.key[1:]]
        for item in items
        if item.tape_holder is None and item.key[1:] in default_runners
    }


class _PlacementInputs:
    """The items with the data that every pass uses."""

    def __init__(self, items: Sequence[WorkItem], pool: RunnerPool) -> None:
        self.items, self.pool = items, pool
        self.action_costs = action_costs(pool.costs, pool.segments)
        self.send_costs = send_costs(pool.costs, pool.segments)
        produced = {
            (item.key, kind is Kind.F) for item in items for kind in item.kinds if kind in (Kind.F, Kind.I, Kind.B)
        }
        required = ([self._required_tensor(item.key, kind) for kind in item.kinds] for item in items)
        self.required_tensors = [[tensor if tensor in produced else None for tensor in tensors] for tensors in required]
        """By item and action index: the input that another item produces; None if it is available already."""

    def _required_tensor(self, key: WorkKey, kind: Kind) -> _TensorKey | None:
        step, segment, micro = key
        if kind is Kind.F:
            return (WorkKey(step, segment - 1, micro), True) if segment else None
        if kind in (Kind.I, Kind.B) and segment + 1 < self.pool.segments:
            return WorkKey(step, segment + 1, micro), False
        return None

    @cached_property
    def chain_lengths(self) -> dict[tuple[int, int], float]:
        """By item and action index: the length of the longest chain of actions that starts there."""
        consumers: dict[_TensorKey, list[tuple[int, int]]] = {}
        for number, required in enumerate(self.required_tensors):
            for index, needs in enumerate(required):
                if needs is not None:
                    consumers.setdefault(needs, []).append((number, index))
        lengths: dict[tuple[int, int], float] = {}
        for number, item in enumerate(self.items):
            for index in range(len(item.kinds)):
                self._add_chain_length(number, index, consumers, lengths)
        return lengths

    def _add_chain_length(
        self,
        number: int,
        index: int,
        consumers: Mapping[_TensorKey, Sequence[tuple[int, int]]],
        lengths: dict[tuple[int, int], float],
    ) -> float:
        """The length of the longest chain that starts at an action, added to `lengths`. No function in a function: one
        that calls itself is part of a cycle, which would keep all items until the next garbage collection."""
        if (number, index) not in lengths:
            item = self.items[number]
            kind = item.kinds[index]
            after = [(number, index + 1)] if index + 1 < len(item.kinds) else []
            after += consumers.get((item.key, kind is Kind.F), []) if kind is not Kind.W else []
            duration = self.action_costs[kind][item.key.segment]
            rest = (self._add_chain_length(*each, consumers, lengths) for each in after)
            lengths[number, index] = duration + max(rest, default=0.0)
        return lengths[number, index]


class _PlacementPass:
    """A simulation. Events are (time, sequence number, worker, item): a worker is free, or an item can continue."""

    def __init__(
        self, inputs: _PlacementInputs, default_runners: Mapping[WorkItem, int], longest_chain_first: bool = False
    ) -> None:
        items, pool = inputs.items, inputs.pool
        self.items, self.pool, self.default_runners = items, pool, default_runners
        self.action_costs, self.send_costs, self.required_tensors = (
            inputs.action_costs,
            inputs.send_costs,
            inputs.required_tensors,
        )
        self.chain_lengths = inputs.chain_lengths if longest_chain_first else None
        self.progress = [0] * len(items)
        self.runner: list[int | None] = [item.tape_holder for item in items]
        self.available_at: dict[_TensorKey, float] = {}
        self.open_counts = Counter((item.key.step, self._stage(item)) for item in items if not item.output_only)
        self.open_forwards: Counter[tuple[int, int]] = Counter()
        self.task_lists: list[list[StepTask]] = [[] for _ in range(pool.worker_count)]
        self.free_workers = {w for held in (pool.runners, pool.other_holders) for ws in held.values() for w in ws}
        self.free_workers |= {*pool.leaving_workers}
        self.bound_queues: dict[int, list[_QueueEntry]] = {worker: [] for worker in self.free_workers}
        self.shared_queues: dict[tuple[int, ...], list[_QueueEntry]] = {}
        self.blocked_items: list[int] = []
        self.waiting_items: dict[_TensorKey, list[int]] = {}
        self.events: list[tuple[float, int, int, int]] = []
        self.numbers = count()
        self.makespan = 0.0

    def _stage(self, item: WorkItem) -> int:
        return item.key.segment % self.pool.stages

    def run(self) -> Placement:
        for number in range(len(self.items)):
            self._queue_or_wait(number, 0.0)
        self._dispatch(0.0)
        while self.events:
            now = self.events[0][0]
            while self.events and self.events[0][0] == now:
                _, _, worker, number = heappop(self.events)
                if worker >= 0:
                    self.free_workers.add(worker)
                else:
                    self._queue_or_wait(number, now)
            self._dispatch(now)
        stuck = [item for item, at in zip(self.items, self.progress, strict=True) if at < len(item.kinds)]
        assert not stuck, f"no worker can run {stuck[0]}"
        return Placement(tuple(map(tuple, self.task_lists)), self.makespan)

    def _queue_or_wait(self, number: int, now: float) -> None:
        """Queue the next action of an item if its inputs are available; otherwise record what it waits for."""
        item = self.items[number]
        if self.progress[number] == len(item.kinds):
            return
        kind = item.kinds[self.progress[number]]
        if kind is Kind.F and self._waits_for_older_step(item):
            self.blocked_items.append(number)
            return
        needed = self.required_tensors[number][self.progress[number]]
        if needed is not None:
            ready = self.available_at.get(needed)
            if ready is None:
                self.waiting_items.setdefault(needed, []).append(number)
                return
            if ready > now:
                heappush(self.events, (ready, next(self.numbers), -1, number))
                return
        self._push_ready(number, kind)

    def _waits_for_older_step(self, item: WorkItem) -> bool:
        """Whether the gradients of an older step must be summed first, in this stage or in all stages."""
        step, stage = item.key.step, self._stage(item)
        return any(
            left and older < step and (self.pool.synchronous_step or open_stage == stage)
            for (older, open_stage), left in self.open_counts.items()
        )

    def _push_ready(self, number: int, kind: Kind) -> None:
        item = self.items[number]
        rank = (
            _KIND_PRIORITY[kind] if self.chain_lengths is None else -self.chain_lengths[number, self.progress[number]]
        )
        order = (item.key.step, rank, item.key.micro, number)
        worker = self.runner[number]
        if worker is None:
            worker, allowed = self.default_runners.get(item), possible_runners(item, self.pool)
            if worker not in allowed:
                heappush(self.shared_queues.setdefault(allowed, []), (order, number))
                return
        heappush(self.bound_queues[worker], (order, number))

    def _dispatch(self, now: float) -> None:
        """Start actions on free workers. Among workers that share work, the one with the fewest tasks chooses first."""
        for worker in sorted(self.free_workers, key=lambda worker: (len(self.task_lists[worker]), worker)):
            queue = self._best_queue(worker)
            if queue is not None:
                self._start(worker, heappop(queue)[1], now)

    def _best_queue(self, worker: int) -> list[_QueueEntry] | None:
        own = self.bound_queues[worker]
        queues = [own] if own else []
        queues += [queue for allowed, queue in self.shared_queues.items() if queue and worker in allowed]
        if self.pool.max_lead is not None:
            queues = [queue for queue in queues if self._may_start(worker, queue[0][1])]
            if not queues and own:
                return self._first_runnable_behind(worker)
        return min(queues, key=lambda queue: queue[0]) if len(queues) > 1 else queues[0] if queues else None

    def _may_start(self, worker: int, number: int) -> bool:
        item = self.items[number]
        if self.pool.max_lead is None or item.kinds[self.progress[number]] is not Kind.F:
            return True
        stages = self.pool.segments - item.key.segment
        return self.open_forwards[worker, item.key.segment] < stages + self.pool.max_lead

    def _first_runnable_behind(self, worker: int) -> list[_QueueEntry] | None:
        """The forwards at the front exceed the limit: take the first action behind them that can run."""
        queue = self.bound_queues[worker]
        behind = [entry for entry in queue if self._may_start(worker, entry[1])]
        if not behind:
            return None
        first = min(behind)
        queue.remove(first)
        return [first]

    def _start(self, worker: int, number: int, now: float) -> None:
        item = self.items[number]
        kind = item.kinds[self.progress[number]]
        end = now + self.action_costs[kind][item.key.segment] * self.pool.slow_workers.get(worker, 1.0)
        self.runner[number] = worker
        self.progress[number] += 1
        self.task_lists[worker].append(
            StepTask(item.key.step, Action(item.key.segment, kind, item.key.micro), item.output_only)
        )
        self.open_forwards[worker, item.key.segment] += (kind is Kind.F) - (kind in (Kind.I, Kind.B))
        self.free_workers.discard(worker)
        self.makespan = max(self.makespan, end)
        heappush(self.events, (end, next(self.numbers), worker, number))
        heappush(self.events, (end, next(self.numbers), -1, number))
        if kind is Kind.W:
            self._count_accumulated(item, end)
        else:
            self._publish_output(item, kind, end)
        if kind is Kind.B:
            self._count_accumulated(item, end)

    def _publish_output(self, item: WorkItem, kind: Kind, end: float) -> None:
        forward = kind is Kind.F
        segment = item.key.segment
        crosses = segment + 1 < self.pool.segments if forward else segment > 0
        arrival = end + (self.send_costs[segment if forward else segment - 1] if crosses else 0.0)
        self.available_at[item.key, forward] = arrival
        for number in self.waiting_items.pop((item.key, forward), ()):
            heappush(self.events, (arrival, next(self.numbers), -1, number))

    def _count_accumulated(self, item: WorkItem, end: float) -> None:
        """Count a gradient as summed; the last one of a step releases the blocked forwards of the next step."""
        if item.output_only:
            return
        self.open_counts[item.key.step, self._stage(item)] -= 1
        if not self.open_counts[item.key.step, self._stage(item)]:
            for number in self.blocked_items:
                heappush(self.events, (end, next(self.numbers), -1, number))
            self.blocked_items = []


def whole_step_items(segments: int, micro_batches: int, *, split: bool, step: int = 0) -> list[WorkItem]:
    """All work items of a step."""
    kinds = (Kind.F, Kind.I, Kind.W) if split else (Kind.F, Kind.B)
    return [WorkItem(WorkKey(step, g, m), kinds) for m in range(micro_batches) for g in range(segments)]
