"""Losses, accuracies and counters of a graph server, collected until the next report to the leader."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from culm.gnn.server.store_records import GraphServerReport

if TYPE_CHECKING:
    from culm.gnn.model.task_kernel import TaskResult
    from culm.gnn.scheduler.interval_scheduler import IntervalScheduler
    from culm.gnn.scheduler.passes import Pass

_REPORT_S = 0.25


class ReportBuffer:
    """Collects the contents of a graph server's next report. Epochs are training epochs."""

    def __init__(self, server: int, generation: int, intervals: int) -> None:
        self._server, self._generation, self._intervals = server, generation, intervals
        self._losses: dict[int, dict[int, tuple[float, int]]] = {}
        """By epoch and interval, so that the sum has a fixed order."""
        self._evaluations: dict[int, dict[int, tuple[int, ...]]] = {}
        self._pass_ends: dict[int, float] = {}
        self._evaluation_complete = asyncio.Event()
        self.late_results = 0
        self._worker_seconds, self._worker_tasks = 0.0, 0

    def add_loss(self, graph_pass: Pass, interval: int, result: TaskResult) -> None:
        """Add the result of the last AV of an interval."""
        if graph_pass.train:
            self._losses.setdefault(graph_pass.epoch, {})[interval] = (result.loss, result.counts[0])
            return
        self._evaluations.setdefault(graph_pass.epoch, {})[interval] = result.counts
        if len(self._evaluations[graph_pass.epoch]) == self._intervals:
            self._evaluation_complete.set()

    def add_pass_end(self, pass_number: int, now: float) -> None:
        self._pass_ends[pass_number] = now

    def add_worker_time(self, seconds: float) -> None:
        self._worker_seconds += seconds
        self._worker_tasks += 1

    async def wait_until_due(self) -> None:
        """Wait until an evaluation is complete, for which the leader waits, or until the report interval is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_S):
                await self._evaluation_complete.wait()
        self._evaluation_complete.clear()

    def take_report(self, scheduler: IntervalScheduler, workers: int) -> GraphServerReport:
        """Return everything that is complete and has not been reported yet."""
        losses = {
            e: (sum(loss for _, (loss, _) in sorted(v.items())), sum(count for _, count in v.values()))
            for e, v in self._losses.items()
            if len(v) == self._intervals
        }
        counts = {
            e: tuple(sum(column) for column in zip(*v.values(), strict=True))
            for e, v in self._evaluations.items()
            if len(v) == self._intervals
        }
        for epoch in losses:
            del self._losses[epoch]
        for epoch in counts:
            del self._evaluations[epoch]
        pass_ends, self._pass_ends = self._pass_ends, {}
        return GraphServerReport(
            generation=self._generation,
            server=self._server,
            losses=losses,
            evaluations=counts,
            pass_end_times=pass_ends,
            queue=scheduler.count_ready("worker"),
            running=scheduler.busy_count,
            workers=workers,
            spread=scheduler.pass_spread,
            relaunches=scheduler.relaunches,
            refused=self.late_results,
            worker_seconds=self._worker_seconds,
            worker_tasks=self._worker_tasks,
            finished=scheduler.is_finished,
        )
