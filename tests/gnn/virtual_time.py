"""One graph server and its workers in virtual time: the real scheduler and worker selection, with a simulated clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from culm.gnn.model.gnn_model import GnnModel
from culm.gnn.model.pass_steps import layers_with_gradients, steps_of_pass
from culm.gnn.scheduler.connected_workers import ConnectedWorker, ConnectedWorkers
from culm.gnn.scheduler.interval_scheduler import IntervalScheduler, Mode
from culm.gnn.scheduler.passes import IntervalTask, list_passes

MODEL = GnnModel(kind="gcn", widths=(128, 64, 8), dropout=0.0, input_dropout=0.0)
STEP_MS = {"AV1": 1.5, "∇AV1": 2.5, "SC1": 0.1, "∇SC1": 0.1, "GA1": 0.5, "∇GA1": 0.5, "AV2": 0.4}
"""Duration of steps: 1.6 ms per interval on the server, 4 ms on workers."""


@dataclass(order=True)
class _QueuedTask:
    task: IntervalTask
    versions: dict[int, int] = field(compare=False)
    arrived_at: float = field(compare=False)
    follow_up: tuple[IntervalTask, dict[int, int]] | None = field(compare=False, default=None)


class VirtualTimeRun:
    """Every interval gathers from all others. A task reaches a worker `latency_ms` after it was sent."""

    def __init__(
        self, mode: Mode, staleness: int = 0, *, latency_ms: float, intervals: int = 16, workers: int = 4
    ) -> None:
        self._latency, self._intervals = latency_ms, intervals
        gather_sources = [[(0, i) for i in range(intervals)]] * intervals
        self._scheduler = IntervalScheduler(
            MODEL, server=0, gather_sources=gather_sources, passes=list_passes(24, 100), mode=mode, staleness=staleness
        )
        for layer in range(MODEL.layers):
            self._scheduler.record_version(layer, 0)
        self._workers = ConnectedWorkers(2)
        for number in range(workers):
            self._workers.add(f"w{number}", None).is_ready = True  # type: ignore[arg-type]
        self._queues: dict[str, list[_QueuedTask]] = {worker.name: [] for worker in self._workers.all()}
        self._busy: set[str] = set()
        self._gradients: dict[tuple[int, int], int] = {}
        self._versions = dict.fromkeys(range(MODEL.layers), 0)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._pass_ends: dict[int, float] = {}

    def ms_per_epoch(self) -> float:
        """Return the mean duration of an epoch in the second half of the run."""
        self._dispatch()
        while not self._scheduler.is_finished:
            self._now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        first, last = 12, max(p.number for p in self._scheduler.passes if p.train)
        return (self._pass_ends[last] - self._pass_ends[first]) / (last - first)

    def _schedule(self, ms: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self._now + ms, next(self._order), action, arguments))

    def _dispatch(self) -> None:
        for task in list(self._scheduler.ready_tasks("worker")):
            worker = self._workers.choose_worker(
                task, self._scheduler.workers_on(task), self._scheduler.is_waiting_for_weights
            )
            if worker is not None:
                self._send_task(task, worker)
        server_task = self._scheduler.next_task("server")
        if server_task is not None and "server" not in self._busy:
            self._busy.add("server")
            self._schedule(STEP_MS[str(self._scheduler.step_of(server_task))], self._finish_server_step, server_task)

    def _finish_server_step(self, task: IntervalTask) -> None:
        self._busy.discard("server")
        self._complete_task(task)
        self._dispatch()

    def _send_task(self, task: IntervalTask, worker: ConnectedWorker) -> None:
        follow_up, versions = self._scheduler.follow_up_task(task), self._scheduler.pin_versions(task)
        worker.tasks[task] = self._now
        self._scheduler.start_task(task, worker.name, self._now)
        queued = _QueuedTask(task, versions, 0.0)
        if follow_up is not None:
            worker.follow_ups[task] = follow_up
            queued.follow_up = (follow_up, self._scheduler.pin_versions(follow_up))
        self._schedule(self._latency, self._deliver_task, worker.name, queued)

    def _deliver_task(self, name: str, queued: _QueuedTask) -> None:
        queued.arrived_at = self._now
        self._queues[name].append(queued)
        self._start_next(name)

    def _start_next(self, name: str) -> None:
        runnable = [j for j in self._queues[name] if all(self._versions[n] >= v for n, v in j.versions.items())]
        if runnable and name not in self._busy:
            queued = min(runnable)
            self._queues[name].remove(queued)
            self._busy.add(name)
            ms = STEP_MS[str(self._scheduler.step_of(queued.task))]
            self._schedule(ms, self._finish_worker_task, name, queued, ms)

    def _finish_worker_task(self, name: str, queued: _QueuedTask, ms: float) -> None:
        self._busy.discard(name)
        worker = self._workers.get(name)
        assert worker is not None
        self._workers.complete_task(
            worker, queued.task, self._now, waited_s=self._now - ms - queued.arrived_at, compute_s=ms
        )
        follow_up = worker.follow_ups.pop(queued.task, None)
        self._complete_task(queued.task)
        if queued.follow_up is not None and follow_up is not None:
            self._workers.start_follow_up(worker, follow_up)
            self._scheduler.start_task(follow_up, name, self._now)
            self._queues[name].append(_QueuedTask(*queued.follow_up, self._now))
        self._start_next(name)
        self._dispatch()

    def _complete_task(self, task: IntervalTask) -> None:
        step, graph_pass = self._scheduler.step_of(task), self._scheduler.passes[task.pass_number]
        for layer in layers_with_gradients(MODEL, step) if graph_pass.train else ():
            self._count_gradient(layer, graph_pass.epoch)
        self._scheduler.complete_task(task, self._now)
        if self._scheduler.own_slowest_pass > max(self._pass_ends, default=-1) + 1:
            self._pass_ends[self._scheduler.own_slowest_pass - 1] = self._now

    def _count_gradient(self, layer: int, epoch: int) -> None:
        self._gradients[layer, epoch] = self._gradients.get((layer, epoch), 0) + 1
        if self._gradients[layer, epoch] == self._intervals * gradient_parts_per_layer(MODEL)[layer]:
            self._versions[layer] = epoch + 1
            self._scheduler.record_version(layer, epoch + 1, self._now)
            for name in self._queues:
                self._start_next(name)


def gradient_parts_per_layer(model: GnnModel) -> dict[int, int]:
    """Return the number of gradient contributions of each interval to each layer, per training epoch."""
    counted = dict.fromkeys(range(model.layers), 0)
    for step in steps_of_pass(model, train=True):
        for layer in layers_with_gradients(model, step):
            counted[layer] += 1
    return counted
