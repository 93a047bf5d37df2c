"""Shorten an existing schedule: every action stays with its worker, only the order of the actions changes.

The lists are scheduled backwards from their end, last-ended action first, then forwards again in the order of the
resulting start times, and so on as long as the makespan decreases. This moves actions on a long chain or a busy worker
to the front, which a rule that looks at one action at a time cannot do.

Time follows the executor: a worker runs its list step by step, and leaves a step when the gradient sums of all stages
that it holds are complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from culm.plan.recover.task_dependencies import StepTask, task_dependencies
from culm.schedule.action import WEIGHT_GRAD_KINDS
from culm.schedule.plan_timing import action_costs, send_costs

if TYPE_CHECKING:
    from culm.plan.recover.place_work import RunnerPool

_MAX_ROUNDS = 4
"""Maximum number of backward and forward rounds; most of the gain comes with the first two."""
_WeightedEdges: TypeAlias = list[list[tuple[int, float]]]
"""By task: the tasks that depend on it, and the delay until its output arrives there."""


def compact_schedule(
    task_lists: Sequence[Sequence[StepTask]], pool: RunnerPool, target: float = 0.0
) -> tuple[tuple[tuple[StepTask, ...], ...], float]:
    """Return the lists in a better order and their makespan. Stops once the makespan is at most `target`."""
    graph = _TaskGraph(task_lists, pool)
    starts = graph.schedule_forward(list(range(len(graph.tasks))))
    best = graph.makespan(starts), starts
    for _ in range(_MAX_ROUNDS):
        if best[0] <= target + 1e-9:
            break
        late = graph.schedule_backward([-graph.end_time(starts, number) for number in range(len(starts))])
        starts = graph.schedule_forward(late)
        if graph.makespan(starts) >= best[0]:
            break
        best = graph.makespan(starts), starts
    return graph.to_task_lists(best[1]), best[0]


class _TaskGraph:
    """Tasks by index with their worker, duration and successors. After the tasks come gates, which no worker runs and
    which take no time: a worker passes one between two steps."""

    def __init__(self, task_lists: Sequence[Sequence[StepTask]], pool: RunnerPool) -> None:
        price = action_costs(pool.costs, pool.segments)
        self.tasks = [task for row in task_lists for task in row]
        self.worker_of = [worker for worker, row in enumerate(task_lists) for _ in row]
        self.durations = [price[task.action.kind][task.action.segment] for task in self.tasks]
        self.worker_count = len(task_lists)
        self.successors: _WeightedEdges = [[] for _ in self.tasks]
        self._add_dependencies(pool)
        self._add_step_gates(pool)
        self.predecessors: _WeightedEdges = [[] for _ in self.successors]
        for number, edges in enumerate(self.successors):
            for target, delay in edges:
                self.predecessors[target].append((number, delay))

    def _add_dependencies(self, pool: RunnerPool) -> None:
        send = send_costs(pool.costs, pool.segments)
        for source, target, boundary in task_dependencies(self.tasks):
            self.successors[source].append((target, 0.0 if boundary is None else send[boundary]))

    def _add_step_gates(self, pool: RunnerPool) -> None:
        steps = sorted({task.step for task in self.tasks})
        stages_of = _stages_by_worker(pool)
        for step, later in pairwise(steps):
            for worker in range(self.worker_count):
                released = [
                    n for n, task in enumerate(self.tasks) if task.step == later and self.worker_of[n] == worker
                ]
                stages = set(range(pool.stages)) if pool.synchronous_step else stages_of[worker]
                self._add_gate(
                    released,
                    [n for n in range(len(self.tasks)) if self._must_finish_first(n, step, worker, stages, pool)],
                )

    def _must_finish_first(self, number: int, step: int, worker: int, stages: set[int], pool: RunnerPool) -> bool:
        """Whether a worker that holds these stages has to wait for a task before it leaves the step."""
        task = self.tasks[number]
        adds = (
            task.action.kind in WEIGHT_GRAD_KINDS
            and not task.output_only
            and task.action.segment % pool.stages in stages
        )
        return task.step == step and (adds or self.worker_of[number] == worker)

    def _add_gate(self, released: Iterable[int], awaited: Iterable[int]) -> None:
        gate = len(self.durations)
        self.durations.append(0.0)
        self.worker_of.append(self.worker_count + gate)
        self.successors.append([(number, 0.0) for number in released])
        for number in awaited:
            self.successors[number].append((gate, 0.0))

    def schedule_forward(self, rank: Sequence[float]) -> list[float]:
        """Start times if a free worker runs the ready task with the lowest rank."""
        return self._schedule(rank, self.predecessors, self.successors)

    def schedule_backward(self, rank: Sequence[float]) -> list[float]:
        """The same in reversed time: minus the time before the end at which each task starts."""
        starts = self._schedule(rank, self.successors, self.predecessors)
        return [-self.end_time(starts, number) for number in range(len(starts))]

    def _schedule(self, rank: Sequence[float], before: _WeightedEdges, after: _WeightedEdges) -> list[float]:
        rank = [*rank, *[0.0] * (len(self.durations) - len(rank))]
        waits = [len(edges) for edges in before]
        starts, ready = [0.0] * len(self.durations), [0.0] * len(self.durations)
        free: defaultdict[int, float] = defaultdict(float)
        queues: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        events = [(0.0, number) for number, left in enumerate(waits) if not left]
        while events:
            now, woken = events[0][0], set()
            while events and events[0][0] == now:  # a task became ready, or (number < 0) a worker free
                number = heappop(events)[1]
                woken.add(-1 - number if number < 0 else self.worker_of[number])
                if number >= 0:
                    heappush(queues[self.worker_of[number]], (rank[number], number))
            for worker in sorted(woken):
                if not queues[worker] or free[worker] > now:
                    continue
                chosen = heappop(queues[worker])[1]
                starts[chosen] = now
                end = free[worker] = now + self.durations[chosen]
                heappush(events, (end, -1 - worker))
                for target, delay in after[chosen]:
                    ready[target] = max(ready[target], end + delay)
                    waits[target] -= 1
                    if not waits[target]:
                        heappush(events, (ready[target], target))
        return starts

    def end_time(self, starts: Sequence[float], number: int) -> float:
        return starts[number] + self.durations[number]

    def makespan(self, starts: Sequence[float]) -> float:
        return max((self.end_time(starts, number) for number in range(len(starts))), default=0.0)

    def to_task_lists(self, starts: Sequence[float]) -> tuple[tuple[StepTask, ...], ...]:
        rows: list[list[StepTask]] = [[] for _ in range(self.worker_count)]
        for number in sorted(range(len(self.tasks)), key=lambda n: (starts[n], self.end_time(starts, n))):
            rows[self.worker_of[number]].append(self.tasks[number])
        return tuple(map(tuple, rows))


def _stages_by_worker(pool: RunnerPool) -> dict[int, set[int]]:
    stages_of: defaultdict[int, set[int]] = defaultdict(set)
    for holders in (pool.runners, pool.other_holders):
        for stage, workers in holders.items():
            for worker in workers:
                stages_of[worker].add(stage)
    return stages_of
