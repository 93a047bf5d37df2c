"""The board of a graph server: where every interval stands, what may run now, and what has been counted.

Pure: events go in, tasks come out, time is a parameter. An interval walks through the steps of a pass one after the
other; the oldest work goes first. The modes differ only in what a step waits for:

    sync    all intervals of this server have finished the step before (and what a gather reads is of this pass)
    pipe    what a gather reads is of this pass
    async   what a gather reads is at most S + 1 passes old, and nobody runs more than S passes ahead of the slowest

A pass is one training epoch, or one evaluation. Weights have versions: version n has seen the gradients of n epochs.
The version that an interval reads first in a pass is the one it gets for all of that pass (stashing).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from culm.gnn.feeds import Feed, Feeds
from culm.gnn.hands import Hands
from culm.gnn.model import Model
from culm.gnn.passes import Pass, Task
from culm.gnn.pins import Pins
from culm.gnn.program import Place, Step, walk, weights_of
from culm.gnn.queues import Obstacle, Queues

Mode = Literal["sync", "pipe", "async"]
MODES: tuple[Mode, ...] = ("sync", "pipe", "async")
_PERMIT, _STEP, _SLOWEST = Obstacle("permit"), Obstacle("step"), Obstacle("slowest")


@dataclass
class _Interval:
    number: int
    at: int = 0


class Board:
    """Tasks of one server's intervals. Raises nothing: what does not fit the state any more is answered with False."""

    def __init__(
        self,
        model: Model,
        *,
        server: int,
        feeds: Sequence[Sequence[Feed]],
        plan: Sequence[Pass],
        mode: Mode = "sync",
        staleness: int = 0,
        start: int = 0,
        servers: int = 1,
        edges: Place = "worker",
    ) -> None:
        self._mode, self._staleness = mode, staleness
        self.plan, self.start = plan, start
        self._walks = {train: walk(model, train=train, edges=edges) for train in (True, False)}
        self._reads = {step: weights_of(model, step) for step in self._walks[True] + self._walks[False]}
        self._server = server
        self._intervals = [_Interval(start) for _ in feeds]
        self._last: tuple[int, int] | None = None
        self._feeds = Feeds(feeds, server)
        self._slowest: dict[int, int] = {other: start for other in range(servers) if other != server}
        self._pins = Pins(staleness if mode == "async" else 0)
        trained = next((p.number for p in plan[start:] if p.train), start)
        self._first = {False: start, True: trained}
        """The first pass that sends rows forward, and back: nothing older is ever there."""
        self._permitted = len(plan)
        self._hands, self._queues = Hands(), Queues()
        for interval in range(len(self._intervals)):
            self._line_up(interval)

    # What is asked.

    def step(self, task: Task) -> Step:
        return self._walks[self.plan[task.number].train][task.at]

    def next(self, place: Place) -> Task | None:
        """The oldest task that may start there now."""
        return next(self.ready(place), None)

    def ready(self, place: Place) -> Iterator[Task]:
        """All tasks that may start there now, oldest first: those to be run again before all others. Tasks may begin
        while one goes through them; nothing else may be asked or told meanwhile."""
        yield from sorted(t for t in self._hands.again if self.step(t).place == place)
        for turn, task in self._queues.line(place):
            if not self.current(task) or task in self._hands or task in self._hands.again:
                self._queues.drop(place, turn, task)  # somebody had it since
            elif (obstacle := self._obstacle(task)) is not None:
                self._queues.set_aside(place, turn, task, obstacle)
            else:
                yield task

    def why_not(self, task: Task) -> str | None:
        """What a task waits for, for people; None: nothing."""
        obstacle, now = self._obstacle(task), self.plan[task.number]
        if obstacle is None:
            return None
        layer, behind = obstacle.layer, task.number - self.slowest
        return {
            "permit": f"pass {task.number} is not permitted yet",
            "step": "another interval is still at the step before",
            "slowest": f"the slowest interval is {behind} passes behind, {self._staleness} are allowed",
            "rows": f"rows of layer {layer} have not come from all neighbours",
            "weights": f"version {self._pins.needed(task, now, layer)} of layer {layer} is not there yet",
        }[obstacle.what]

    def _obstacle(self, task: Task) -> Obstacle | None:
        """The first thing that a task waits for."""
        step, now = self.step(task), self.plan[task.number]
        if now.number >= self._permitted:
            return _PERMIT
        if self._mode == "sync" and self._furthest_behind < (task.number, task.at):
            return _STEP
        if (self._mode == "async" and (task.at == 0 or step.gathers)) and now.number - self.slowest > self._staleness:
            return _SLOWEST
        if step.gathers:
            lagging = self._feeds.lagging(task.interval, step.layer, step.back, self._needed(task, step.back))
            if lagging is not None:
                return Obstacle("rows", step.layer, step.back, lagging)
        missing = self._pins.missing(task, now, self._reads[step])
        return None if missing is None else Obstacle("weights", missing)

    def _needed(self, task: Task, back: bool) -> int:
        """The oldest pass whose rows may be gathered."""
        now = self.plan[task.number]
        if self._mode != "async" or not now.train:
            return now.number
        first, oldest = self._first[back], task.number - 1 - self._staleness
        while back and oldest > first and not self.plan[oldest].train:
            oldest -= 1  # evaluations send nothing back
        return max(first, oldest)

    def versions(self, task: Task) -> dict[int, int]:
        """The version of each layer that a task reads; from here on pinned for its interval until the pass ends."""
        return self._pins.read(task, self.plan[task.number], self._reads[self.step(task)])

    def following(self, task: Task) -> Task | None:
        """The first task of an interval's next pass, if whoever does the last one of this pass may go on with it.

        So it needs no way of its own: it waits at the worker for its weights. Without pipelining (`sync`): None.
        """
        number = task.number + 1
        last = task.at + 1 == len(self._walks[self.plan[task.number].train])
        if self._mode == "sync" or not last or number >= min(self._permitted, len(self.plan)):
            return None
        then = Task(number, 0, task.interval)
        return then if self.step(then).place == self.step(task).place == "worker" else None

    def waits(self, task: Task) -> bool:
        """Whether a task that was given out ahead of its time still waits for its weights."""
        return self._hands.waits(task)

    def oldest_version(self, layer: int) -> int:
        """No interval of this server will ever ask for an older one."""
        return self._pins.oldest(layer)

    @property
    def slowest(self) -> int:
        """The pass in which the slowest interval of all servers is."""
        return min(self.own_slowest, *self._slowest.values()) if self._slowest else self.own_slowest

    @property
    def own_slowest(self) -> int:
        return self._furthest_behind[0]

    @property
    def _furthest_behind(self) -> tuple[int, int]:
        """Where the last of the intervals is: asked for with every task, and looked for only when one has moved."""
        if self._last is None:
            self._last = min((mine.number, mine.at) for mine in self._intervals)
        return self._last

    @property
    def finished(self) -> bool:
        return self.own_slowest >= len(self.plan)

    @property
    def spread(self) -> int:
        """Passes between the fastest and the slowest interval of this server."""
        return max(i.number for i in self._intervals) - self.own_slowest

    def queue(self, place: Place) -> int:
        """Tasks that could start there if somebody were free."""
        return sum(1 for _ in self.ready(place))

    def running(self) -> Mapping[Task, Sequence[str]]:
        return self._hands.all()

    def workers(self, task: Task) -> tuple[str, ...]:
        """Who works on a task."""
        return self._hands.workers(task)

    @property
    def busy(self) -> int:
        """Tasks that somebody works on now: what waits at a worker for its weights keeps nobody busy."""
        return self._hands.busy

    @property
    def relaunches(self) -> int:
        return self._hands.relaunches

    # What happens.

    def current(self, task: Task) -> bool:
        """Whether a task is still to be finished: the result of any other comes too late."""
        mine = self._intervals[task.interval]
        return (mine.number, mine.at) == task[:2] and task.number < len(self.plan)

    def begin(self, task: Task, worker: str, now: float) -> None:
        """Somebody starts on a task."""
        self._hands.begin(task, worker, now, waits=self._pins.promised(task))

    def done(self, task: Task, now: float) -> bool:
        """A task is finished, by whoever: True the first time, and only then its result counts."""
        if not self.current(task):
            return False
        step = self.step(task)
        self._hands.done(task, str(step), now)
        if step.kind == "SC":
            self.arrived((self._server, task.interval), step.layer, step.back, task.number)
        self._advance(task)
        return True

    def _advance(self, task: Task) -> None:
        mine, before = self._intervals[task.interval], self._furthest_behind
        mine.at += 1
        if mine.at == len(self._walks[self.plan[task.number].train]):
            mine.number, mine.at = mine.number + 1, 0
            self._pins.ended(task.interval, task.number)
        if before == task[:2]:
            self._last = None
            self._moved(before)
        self._line_up(task.interval)

    def _moved(self, before: tuple[int, int]) -> None:
        """Maybe the last of the intervals has: some may have waited for that."""
        if self._furthest_behind > before:
            self._queues.release(_STEP)
        if self.own_slowest > before[0]:
            self._queues.release(_SLOWEST)

    def _line_up(self, interval: int) -> None:
        """The oldest pass first. Within it whoever is furthest behind, so that rows are fresh when they are gathered;
        but where intervals may be in different passes, whoever is furthest ahead: all of them at the same step would
        all wait for far workers at the same time."""
        mine = self._intervals[interval]
        if mine.number < len(self.plan):
            task = Task(mine.number, mine.at, interval)
            self._queues.add(self.step(task).place, (mine.number, -mine.at if self._staleness else mine.at), task)

    def arrived(self, feed: Feed, layer: int, back: bool, number: int) -> None:
        """Rows of an interval, own or another server's, have come."""
        self._feeds.sent(feed, layer, back, number)
        self._queues.release(Obstacle("rows", layer, back, feed))

    def version(self, layer: int, version: int, now: float = 0.0) -> None:
        """A parameter server has a new version. Whoever has waited for it begins only now."""
        self._pins.published(layer, version)
        self._hands.recheck(self._pins.promised, now)
        self._queues.release(Obstacle("weights", layer))

    def progressed(self, server: int, slowest: int) -> None:
        """Another server says in which pass its slowest interval is."""
        self._slowest[server] = max(slowest, self._slowest.get(server, 0))
        self._queues.release(_SLOWEST)

    def permit(self, until: int) -> None:
        """Passes below this number may run."""
        self._permitted = until
        self._queues.release(_PERMIT)

    def stop_after(self, number: int) -> None:
        """No pass from this number on will ever run."""
        self.plan = self.plan[:number]

    def lost(self, worker: str) -> list[Task]:
        """A worker is gone: what only it worked on is to be run again."""
        return self._hands.lost(worker)

    def overdue(self, now: float) -> list[Task]:
        """Tasks that take too long: to be run a second time, and whoever is first counts."""
        return self._hands.overdue(now, lambda task: str(self.step(task)))

    def refused(self, task: Task, worker: str) -> None:
        """A worker could not do it (what it had kept is gone): it is to be sent again, with everything."""
        self._hands.refused(task, worker)

    def patience(self, step: Step) -> float:
        """Seconds until a task is launched again."""
        return self._hands.patience(str(step))
