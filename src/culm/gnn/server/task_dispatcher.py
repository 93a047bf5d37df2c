"""Dispatch of a graph server's tasks to its workers, and the handling of their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from culm.gnn.model.task_kernel import TaskResult
from culm.gnn.scheduler.connected_workers import ConnectedWorker, ConnectedWorkers
from culm.gnn.scheduler.passes import IntervalTask
from culm.gnn.server.graph_shard import TableSlice
from culm.gnn.transport import gnn_messages as messages

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.model.pass_steps import PassStep
    from culm.gnn.scheduler.interval_scheduler import IntervalScheduler
    from culm.gnn.server.graph_shard import GraphShard
    from culm.gnn.server.report_buffer import ReportBuffer
    from culm.gnn.transport.tensor_link import TensorLink

ResultHandler = Callable[[IntervalTask, "PassStep", TaskResult], None]


class TaskDispatcher:
    """All workers of one graph server. `on_result` gets each task's first result and completes the task."""

    def __init__(
        self,
        scheduler: IntervalScheduler,
        shard: GraphShard,
        report_buffer: ReportBuffer,
        tasks_per_worker: int,
        on_result: ResultHandler,
    ) -> None:
        self._scheduler, self._shard, self._report_buffer, self._on_result = scheduler, shard, report_buffer, on_result
        self._workers = ConnectedWorkers(tasks_per_worker)
        self._no_capacity = False
        """No worker had capacity at the last attempt, and nothing has changed since."""

    def __len__(self) -> int:
        return len(self._workers)

    def worker_links(self) -> list[TensorLink]:
        return [worker.link for worker in self._workers.all()]

    def add_worker(self, name: str, link: TensorLink) -> None:
        self._workers.add(name, link)

    def remove_worker(self, name: str) -> None:
        self._workers.remove(name)
        self._scheduler.handle_worker_lost(name)
        self.mark_capacity_changed()

    def mark_capacity_changed(self) -> None:
        """Note that a worker may have capacity now."""
        self._no_capacity = False

    # Assignments.

    def dispatch_ready_tasks(self) -> None:
        """Send ready tasks to workers, oldest first, while a worker has capacity."""
        if self._no_capacity:
            return
        for task in self._scheduler.ready_tasks("worker"):
            busy = self._scheduler.workers_on(task)
            worker = self._workers.choose_worker(task, busy, self._scheduler.is_waiting_for_weights)
            if worker is not None:
                self._send_task(task, worker)
            elif not busy:
                self._no_capacity = True
                return

    def _send_task(self, task: IntervalTask, worker: ConnectedWorker) -> None:
        step, follow_up = self._scheduler.step_of(task), self._scheduler.follow_up_task(task)
        kept = step.backward and worker.kept_forward_passes.get((task.interval, step.layer)) == task.pass_number
        if not self._scheduler.workers_on(task):
            self._shard.prepare_edge_inputs(step, task.interval)
        message = self._task_message(task, forward_kept=kept)
        if follow_up is not None:
            worker.follow_ups[task] = follow_up
            message = msgspec.structs.replace(message, follow_up=self._task_message(follow_up, forward_kept=False))
        now = time.monotonic()
        worker.tasks[task] = now
        self._scheduler.start_task(task, worker.name, now)
        slices = [*message.slices, *(message.follow_up.slices if message.follow_up is not None else ())]
        worker.link.send(
            message, [] if worker.maps_tables else self._shard.read_slices([TableSlice(*piece) for piece in slices])
        )

    def _task_message(self, task: IntervalTask, *, forward_kept: bool) -> messages.TaskAssignment:
        step, graph_pass = self._scheduler.step_of(task), self._scheduler.passes[task.pass_number]
        return messages.TaskAssignment(
            task=(task.pass_number, task.step_index, task.interval),
            graph_pass=(graph_pass.number, graph_pass.epoch, graph_pass.train),
            step=step[:3],
            versions=self._scheduler.pin_versions(task),
            slices=tuple(
                (p.table, p.start, p.stop)
                for p in self._shard.task_inputs(step, task.interval, forward_kept=forward_kept)
            ),
            forward_kept=forward_kept,
        )

    # Results.

    def handle_message(self, link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        worker = self._workers.get(link.name)
        if worker is None:
            return
        match message:
            case messages.WorkerReady(maps_tables):
                worker.is_ready, worker.maps_tables = True, maps_tables
            case messages.WorkerLeaving():
                worker.is_ready = False
            case messages.TaskRefused(task):
                self._handle_refusal(worker, IntervalTask(*task))
            case messages.TaskDone():
                self._handle_result(worker, message, tensors)
            case _:
                link.close()
        self.mark_capacity_changed()

    def _handle_refusal(self, worker: ConnectedWorker, task: IntervalTask) -> None:
        worker.tasks.pop(task, None)
        worker.follow_ups.pop(task, None)
        worker.kept_forward_passes.clear()
        self._scheduler.handle_refusal(task, worker.name)

    def _handle_result(self, worker: ConnectedWorker, message: messages.TaskDone, tensors: list[Tensor]) -> None:
        task, now = IntervalTask(*message.task), time.monotonic()
        self._workers.complete_task(worker, task, now, waited_s=message.waited_s, compute_s=message.compute_s)
        self._report_buffer.add_worker_time(message.compute_s)
        follow_up = worker.follow_ups.pop(task, None)
        if not self._scheduler.is_current(task):
            self._report_buffer.late_results += 1
            return
        step = self._scheduler.step_of(task)
        if message.forward_kept:
            worker.kept_forward_passes[task.interval, step.layer] = task.pass_number
        self._on_result(task, step, _task_result(message, tensors))
        if follow_up is not None and self._scheduler.is_current(follow_up):
            self._workers.start_follow_up(worker, follow_up)
            self._scheduler.start_task(follow_up, worker.name, now)


def _task_result(message: messages.TaskDone, tensors: list[Tensor]) -> TaskResult:
    gradients: dict[int, dict[str, Tensor]] = {}
    for (layer, name), tensor in zip(message.gradient_names, tensors[int(message.has_rows) :], strict=True):
        gradients.setdefault(layer, {})[name] = tensor
    return TaskResult(tensors[0] if message.has_rows else None, gradients, message.loss, message.counts)
