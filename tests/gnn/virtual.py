"""One graph server and its workers in virtual time: the real board and seats, and a clock that this file moves."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from culm.gnn.board import Board, Mode
from culm.gnn.model import Model
from culm.gnn.passes import Task, passes
from culm.gnn.program import gradients_of, parts
from culm.gnn.seats import Seat, Seats

MODEL = Model(kind="gcn", widths=(128, 64, 8), dropout=0.0, input_dropout=0.0)
MS = {"AV1": 1.5, "∇AV1": 2.5, "SC1": 0.1, "∇SC1": 0.1, "GA1": 0.5, "∇GA1": 0.5, "AV2": 0.4}
"""What steps take: a server has 1.6 ms for each interval, a worker 4."""


@dataclass(order=True)
class _Job:
    task: Task
    versions: dict[int, int] = field(compare=False)
    arrived: float = field(compare=False)
    then: tuple[Task, dict[int, int]] | None = field(compare=False, default=None)


class Clockwork:
    """Every interval gathers from all others. A task reaches a worker `latency_ms` after it was given."""

    def __init__(
        self, mode: Mode, staleness: int = 0, *, latency_ms: float, intervals: int = 16, workers: int = 4
    ) -> None:
        self._latency, self._intervals = latency_ms, intervals
        feeds = [[(0, i) for i in range(intervals)]] * intervals
        self._board = Board(MODEL, server=0, feeds=feeds, plan=passes(24, 100), mode=mode, staleness=staleness)
        for layer in range(MODEL.layers):
            self._board.version(layer, 0)
        self._seats = Seats(2)
        for number in range(workers):
            self._seats.join(f"w{number}", None).ready = True  # type: ignore[arg-type]
        self._queues: dict[str, list[_Job]] = {seat.name: [] for seat in self._seats.all()}
        self._busy: set[str] = set()
        self._gradients: dict[tuple[int, int], int] = {}
        self._versions = dict.fromkeys(range(MODEL.layers), 0)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._ends: dict[int, float] = {}

    def ms_per_epoch(self) -> float:
        """Of the second half of the run."""
        self._pump()
        while not self._board.finished:
            self._now, _, act, given = heapq.heappop(self._events)
            act(*given)
        first, last = 12, max(p.number for p in self._board.plan if p.train)
        return (self._ends[last] - self._ends[first]) / (last - first)

    def _later(self, ms: float, act: Callable[..., None], *given: Any) -> None:
        heapq.heappush(self._events, (self._now + ms, next(self._order), act, given))

    def _pump(self) -> None:
        for task in list(self._board.ready("worker")):
            seat = self._seats.choose(task, self._board.workers(task), self._board.waits)
            if seat is not None:
                self._give(task, seat)
        own = self._board.next("server")
        if own is not None and "server" not in self._busy:
            self._busy.add("server")
            self._later(MS[str(self._board.step(own))], self._served, own)

    def _served(self, task: Task) -> None:
        self._busy.discard("server")
        self._finish(task)
        self._pump()

    def _give(self, task: Task, seat: Seat) -> None:
        then, versions = self._board.following(task), self._board.versions(task)
        seat.tasks[task] = self._now
        self._board.begin(task, seat.name, self._now)
        job = _Job(task, versions, 0.0)
        if then is not None:
            seat.then[task] = then
            job.then = (then, self._board.versions(then))
        self._later(self._latency, self._arrive, seat.name, job)

    def _arrive(self, name: str, job: _Job) -> None:
        job.arrived = self._now
        self._queues[name].append(job)
        self._start(name)

    def _start(self, name: str) -> None:
        able = [j for j in self._queues[name] if all(self._versions[n] >= v for n, v in j.versions.items())]
        if able and name not in self._busy:
            job = min(able)
            self._queues[name].remove(job)
            self._busy.add(name)
            ms = MS[str(self._board.step(job.task))]
            self._later(ms, self._worked, name, job, ms)

    def _worked(self, name: str, job: _Job, ms: float) -> None:
        self._busy.discard(name)
        seat = self._seats.get(name)
        assert seat is not None
        self._seats.returned(seat, job.task, self._now, waited=self._now - ms - job.arrived, seconds=ms)
        then = seat.then.pop(job.task, None)
        self._finish(job.task)
        if job.then is not None and then is not None:
            self._seats.went_on(seat, then)
            self._board.begin(then, name, self._now)
            self._queues[name].append(_Job(*job.then, self._now))
        self._start(name)
        self._pump()

    def _finish(self, task: Task) -> None:
        step, now = self._board.step(task), self._board.plan[task.number]
        for layer in gradients_of(MODEL, step) if now.train else ():
            self._count(layer, now.epoch)
        self._board.done(task, self._now)
        if self._board.own_slowest > max(self._ends, default=-1) + 1:
            self._ends[self._board.own_slowest - 1] = self._now

    def _count(self, layer: int, epoch: int) -> None:
        self._gradients[layer, epoch] = self._gradients.get((layer, epoch), 0) + 1
        if self._gradients[layer, epoch] == self._intervals * parts(MODEL)[layer]:
            self._versions[layer] = epoch + 1
            self._board.version(layer, epoch + 1, self._now)
            for name in self._queues:
                self._start(name)
