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
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from culm.gnn.feeds import Feed, Feeds
from culm.gnn.model import Model
from culm.gnn.pace import Pace
from culm.gnn.program import Place, Step, walk, weights_of

Mode = Literal["sync", "pipe", "async"]
MODES: tuple[Mode, ...] = ("sync", "pipe", "async")


class Pass(NamedTuple):
    """One walk over the graph."""

    number: int
    epoch: int
    train: bool

    @property
    def version(self) -> int:
        """The newest version of the weights that can exist when it starts."""
        return self.epoch if self.train else self.epoch + 1

    def behind(self, version: int) -> int:
        """Updates between a version and the one that the gradients of this pass meet; an evaluation reads the last."""
        return self.version - version


def passes(epochs: int, evaluate_every: int) -> tuple[Pass, ...]:
    """All passes of a run: every epoch, an evaluation after every so many and after the last."""
    found: list[Pass] = []
    for epoch in range(epochs):
        found.append(Pass(len(found), epoch, True))
        if (epoch + 1) % evaluate_every == 0 or epoch + 1 == epochs:
            found.append(Pass(len(found), epoch, False))
    return tuple(found)


class Task(NamedTuple):
    """One step of one interval in one pass: the key under which it counts, once."""

    number: int
    at: int
    interval: int


@dataclass
class _Run:
    """A task that somebody works on."""

    since: float
    workers: list[str]


@dataclass
class _Interval:
    number: int
    at: int = 0
    pinned: dict[int, int] = field(default_factory=dict)
    """Version by layer, from the first read in this pass on."""
    ahead: dict[int, int] = field(default_factory=dict)
    """The same for the next pass, once its first task has been promised to somebody."""


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
        self._model, self._mode, self._staleness = model, mode, staleness
        self.plan, self.start = plan, start
        self._walks = {train: walk(model, train=train, edges=edges) for train in (True, False)}
        self._server = server
        self._intervals = [_Interval(start) for _ in feeds]
        self._last: tuple[int, int] | None = None
        self._feeds = Feeds(feeds, server)
        self._slowest: dict[int, int] = {other: start for other in range(servers) if other != server}
        self._versions: dict[int, int] = {}
        trained = next((p.number for p in plan[start:] if p.train), start)
        self._first = {False: start, True: trained}
        """The first pass that sends rows forward, and back: nothing older is ever there."""
        self._permitted = len(plan)
        self._running: dict[Task, _Run] = {}
        self._again: set[Task] = set()
        self._pace = Pace()
        self.relaunches = 0

    # What is asked.

    def step(self, task: Task) -> Step:
        return self._walks[self.plan[task.number].train][task.at]

    def next(self, place: Place) -> Task | None:
        """The oldest task that may start there now."""
        return next(self.ready(place), None)

    def ready(self, place: Place) -> Iterator[Task]:
        """All tasks that may start there now, oldest first: those to be run again before all others."""
        yield from sorted(t for t in self._again if self.step(t).place == place)
        for interval in sorted(range(len(self._intervals)), key=self._turn):
            task = self._task(interval)
            if task is None or task in self._running or task in self._again:
                continue
            if self.step(task).place == place and self.why_not(task) is None:
                yield task

    def why_not(self, task: Task) -> str | None:
        """What a task waits for, for people; None: nothing."""
        step, now = self.step(task), self.plan[task.number]
        if now.number >= self._permitted:
            return f"pass {now.number} is not permitted yet"
        if self._mode == "sync" and self._furthest_behind < (task.number, task.at):
            return "another interval is still at the step before"
        if (self._mode == "async" and (task.at == 0 or step.gathers)) and now.number - self.slowest > self._staleness:
            return f"the slowest interval is {now.number - self.slowest} passes behind, {self._staleness} are allowed"
        oldest = self._feeds.oldest(task.interval, step.layer, step.back) if step.gathers else task.number
        if oldest < self._needed(task, step.back):
            return f"rows of layer {step.layer} have not come from all neighbours"
        return self._weights_missing(task, step, now)

    def _needed(self, task: Task, back: bool) -> int:
        """The oldest pass whose rows may be gathered."""
        now = self.plan[task.number]
        if self._mode != "async" or not now.train:
            return now.number
        first, oldest = self._first[back], task.number - 1 - self._staleness
        while back and oldest > first and not self.plan[oldest].train:
            oldest -= 1  # evaluations send nothing back
        return max(first, oldest)

    def _weights_missing(self, task: Task, step: Step, now: Pass) -> str | None:
        pinned = self._pinned(task)
        for layer in weights_of(self._model, step):
            needed = pinned.get(layer, self._oldest(now))
            if self._versions.get(layer, -1) < needed:
                return f"version {needed} of layer {layer} is not there yet"
        return None

    def _oldest(self, now: Pass) -> int:
        """The oldest version that a pass may begin with."""
        return max(0, now.version - (self._staleness if self._mode == "async" and now.train else 0))

    def _pinned(self, task: Task) -> dict[int, int]:
        mine = self._intervals[task.interval]
        return mine.pinned if task.number == mine.number else mine.ahead

    def versions(self, task: Task) -> dict[int, int]:
        """The version of each layer that a task reads; from here on pinned for its interval until the pass ends."""
        pinned, now = self._pinned(task), self.plan[task.number]
        for layer in weights_of(self._model, self.step(task)):
            newest = max(self._versions.get(layer, -1), self._oldest(now))
            pinned.setdefault(layer, min(newest, now.version))
        return {layer: pinned[layer] for layer in weights_of(self._model, self.step(task))}

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
        pinned = self._pinned(task)
        return any(self._versions.get(layer, -1) < version for layer, version in pinned.items())

    def oldest_version(self, layer: int) -> int:
        """No interval of this server will ever ask for an older one."""
        newest = self._versions.get(layer, 0)
        held = [i.pinned[layer] for i in self._intervals if layer in i.pinned]
        return min([newest, *held])

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
            self._last = min(map(self._position, range(len(self._intervals))))
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
        return {task: run.workers for task, run in self._running.items()}

    @property
    def busy(self) -> int:
        """Tasks that somebody works on now: what waits at a worker for its weights keeps nobody busy."""
        return sum(not self.waits(task) for task in self._running)

    # What happens.

    def current(self, task: Task) -> bool:
        """Whether a task is still to be finished: the result of any other comes too late."""
        return self._task(task.interval) == task

    def begin(self, task: Task, worker: str, now: float) -> None:
        """Somebody starts on a task."""
        self._again.discard(task)
        run = self._running.setdefault(task, _Run(now, []))
        run.since = now
        run.workers.append(worker)

    def done(self, task: Task, now: float) -> bool:
        """A task is finished, by whoever: True the first time, and only then its result counts."""
        if not self.current(task):
            return False
        run = self._running.pop(task, None)
        self._again.discard(task)
        step = self.step(task)
        if run is not None:
            self._pace.note(str(step), now - run.since)
        if step.kind == "SC":
            self.arrived((self._server, task.interval), step.layer, step.back, task.number)
        self._advance(task)
        return True

    def _advance(self, task: Task) -> None:
        mine, self._last = self._intervals[task.interval], None
        mine.at += 1
        if mine.at == len(self._walks[self.plan[task.number].train]):
            mine.number, mine.at = mine.number + 1, 0
            mine.pinned, mine.ahead = mine.ahead, {}

    def arrived(self, feed: Feed, layer: int, back: bool, number: int) -> None:
        """Rows of an interval, own or another server's, have come."""
        self._feeds.sent(feed, layer, back, number)

    def version(self, layer: int, version: int, now: float = 0.0) -> None:
        """A parameter server has a new version. Whoever has waited for it begins only now."""
        waiting = [task for task in self._running if self.waits(task)]
        self._versions[layer] = max(version, self._versions.get(layer, -1))
        for task in waiting:
            if not self.waits(task):
                self._running[task].since = now

    def progressed(self, server: int, slowest: int) -> None:
        """Another server says in which pass its slowest interval is."""
        self._slowest[server] = max(slowest, self._slowest.get(server, 0))

    def permit(self, until: int) -> None:
        """Passes below this number may run."""
        self._permitted = until

    def stop_after(self, number: int) -> None:
        """No pass from this number on will ever run."""
        self.plan = self.plan[:number]

    def lost(self, worker: str) -> list[Task]:
        """A worker is gone: what only it worked on is to be run again."""
        found = []
        for task, run in list(self._running.items()):
            run.workers = [w for w in run.workers if w != worker]
            if not run.workers:
                del self._running[task]
                found.append(task)
        self._launch_again(found)
        return found

    def overdue(self, now: float) -> list[Task]:
        """Tasks that take too long: to be run a second time, and whoever is first counts."""
        found = []
        for task, run in self._running.items():
            if task in self._again or self.waits(task):
                continue
            if now - run.since > self.patience(self.step(task)):
                found.append(task)
        self._launch_again(found)
        return found

    def refused(self, task: Task, worker: str) -> None:
        """A worker could not do it (what it had kept is gone): it is to be sent again, with everything."""
        run = self._running.get(task)
        if run is not None and worker in run.workers:
            run.workers.remove(worker)
            if not run.workers:
                del self._running[task]
                self._again.add(task)

    def patience(self, step: Step) -> float:
        """Seconds until a task is launched again."""
        return self._pace.patience(str(step))

    def _launch_again(self, tasks: Sequence[Task]) -> None:
        self._again.update(tasks)
        self.relaunches += len(tasks)

    def _turn(self, interval: int) -> tuple[int, int, int]:
        """The oldest pass first. Within it whoever is furthest behind, so that rows are fresh when they are gathered;
        but where intervals may be in different passes, whoever is furthest ahead: all of them at the same step would
        all wait for far workers at the same time."""
        number, at = self._position(interval)
        return number, -at if self._staleness else at, interval

    def _position(self, interval: int) -> tuple[int, int]:
        mine = self._intervals[interval]
        return mine.number, mine.at

    def _task(self, interval: int) -> Task | None:
        number, at = self._position(interval)
        return Task(number, at, interval) if number < len(self.plan) else None
