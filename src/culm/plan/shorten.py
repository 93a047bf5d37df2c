"""Shorten lists that are there: every action stays with its worker, and the order in which a worker runs them changes.

The lists are scheduled backwards from their end, what ended last first, and then forwards again in the order of the
starts that came out, and so on for as long as the end comes nearer. What a long chain or a busy worker hangs on comes
to the front that way, which no rule sees that looks at one action at a time.

Time is as the executor keeps it: a worker runs its list step by step, and leaves a step when the sums of all stages
that it holds are complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from culm.plan.edges import Task, edges
from culm.schedule.action import RELEASE
from culm.schedule.timing import prices, sends

if TYPE_CHECKING:
    from culm.plan.place import Floor

_ROUNDS = 4
"""Backwards and forwards so many times at the most: what can be had is mostly there after two."""
_Edges: TypeAlias = list[list[tuple[int, float]]]
"""By task: what follows on it, and how long the way there takes."""


def shortened(
    lists: Sequence[Sequence[Task]], floor: Floor, goal: float = 0.0
) -> tuple[tuple[tuple[Task, ...], ...], float]:
    """The lists in a better order, and when they are done. Not worked on any more once that is not after the goal."""
    graph = _Graph(lists, floor)
    starts = graph.forwards(list(range(len(graph.tasks))))
    best = graph.end(starts), starts
    for _ in range(_ROUNDS):
        if best[0] <= goal + 1e-9:
            break
        late = graph.backwards([-graph.stop(starts, number) for number in range(len(starts))])
        starts = graph.forwards(late)
        if graph.end(starts) >= best[0]:
            break
        best = graph.end(starts), starts
    return graph.listed(best[1]), best[0]


class _Graph:
    """Tasks by number with who runs each, what it takes, and what follows on it. Beyond the tasks: gates, which nobody
    runs and which take no time; a worker passes one from a step to the next."""

    def __init__(self, lists: Sequence[Sequence[Task]], floor: Floor) -> None:
        price = prices(floor.costs, floor.segments)
        self.tasks = [task for row in lists for task in row]
        self.worker = [worker for worker, row in enumerate(lists) for _ in row]
        self.cost = [price[task.action.kind][task.action.segment] for task in self.tasks]
        self.workers = len(lists)
        self.after: _Edges = [[] for _ in self.tasks]
        self._wire(floor)
        self._gate(floor)
        self.before: _Edges = [[] for _ in self.after]
        for number, some in enumerate(self.after):
            for to, way in some:
                self.before[to].append((number, way))

    def _wire(self, floor: Floor) -> None:
        send = sends(floor.costs, floor.segments)
        for source, target, boundary in edges(self.tasks):
            self.after[source].append((target, 0.0 if boundary is None else send[boundary]))

    def _gate(self, floor: Floor) -> None:
        steps = sorted({task.step for task in self.tasks})
        held = _held(floor)
        for step, later in pairwise(steps):
            for worker in range(self.workers):
                mine = [n for n, task in enumerate(self.tasks) if task.step == later and self.worker[n] == worker]
                stages = set(range(floor.stages)) if floor.joint else held[worker]
                self._add_gate(mine, [n for n in range(len(self.tasks)) if self._waits(n, step, worker, stages, floor)])

    def _waits(self, number: int, step: int, worker: int, stages: set[int], floor: Floor) -> bool:
        """Whether a worker that holds these stages has to see a task done before it leaves the step."""
        task = self.tasks[number]
        adds = task.action.kind in RELEASE and not task.again and task.action.segment % floor.stages in stages
        return task.step == step and (adds or self.worker[number] == worker)

    def _add_gate(self, mine: Iterable[int], awaited: Iterable[int]) -> None:
        gate = len(self.cost)
        self.cost.append(0.0)
        self.worker.append(self.workers + gate)
        self.after.append([(number, 0.0) for number in mine])
        for number in awaited:
            self.after[number].append((gate, 0.0))

    def forwards(self, rank: Sequence[float]) -> list[float]:
        """When each starts if a free worker takes the least rank of what it could start."""
        return self._schedule(rank, self.before, self.after)

    def backwards(self, rank: Sequence[float]) -> list[float]:
        """The same with time turned round; how long before the end each starts, as a number below zero."""
        starts = self._schedule(rank, self.after, self.before)
        return [-self.stop(starts, number) for number in range(len(starts))]

    def _schedule(self, rank: Sequence[float], before: _Edges, after: _Edges) -> list[float]:
        rank = [*rank, *[0.0] * (len(self.cost) - len(rank))]
        waits = [len(some) for some in before]
        starts, ready = [0.0] * len(self.cost), [0.0] * len(self.cost)
        free: defaultdict[int, float] = defaultdict(float)
        queues: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        events = [(0.0, number) for number, left in enumerate(waits) if not left]
        while events:
            now, woken = events[0][0], set()
            while events and events[0][0] == now:  # a task is ready, or a worker is free: it has a number below zero
                number = heappop(events)[1]
                woken.add(-1 - number if number < 0 else self.worker[number])
                if number >= 0:
                    heappush(queues[self.worker[number]], (rank[number], number))
            for worker in sorted(woken):
                if not queues[worker] or free[worker] > now:
                    continue
                chosen = heappop(queues[worker])[1]
                starts[chosen] = now
                end = free[worker] = now + self.cost[chosen]
                heappush(events, (end, -1 - worker))
                for to, way in after[chosen]:
                    ready[to] = max(ready[to], end + way)
                    waits[to] -= 1
                    if not waits[to]:
                        heappush(events, (ready[to], to))
        return starts

    def stop(self, starts: Sequence[float], number: int) -> float:
        return starts[number] + self.cost[number]

    def end(self, starts: Sequence[float]) -> float:
        return max((self.stop(starts, number) for number in range(len(starts))), default=0.0)

    def listed(self, starts: Sequence[float]) -> tuple[tuple[Task, ...], ...]:
        rows: list[list[Task]] = [[] for _ in range(self.workers)]
        for number in sorted(range(len(self.tasks)), key=lambda n: (starts[n], self.stop(starts, n))):
            rows[self.worker[number]].append(self.tasks[number])
        return tuple(map(tuple, rows))


def _held(floor: Floor) -> dict[int, set[int]]:
    held: defaultdict[int, set[int]] = defaultdict(set)
    for holders in (floor.runners, floor.others):
        for stage, workers in holders.items():
            for worker in workers:
                held[worker].add(stage)
    return held
