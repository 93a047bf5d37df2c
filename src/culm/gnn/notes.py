"""What a graph server has to tell whoever leads, collected until it is told."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from culm.gnn.setup import Report

if TYPE_CHECKING:
    from culm.gnn.board import Board
    from culm.gnn.compute import Outcome
    from culm.gnn.passes import Pass

_REPORT_S = 0.25


class Notes:
    """What a graph server has to tell, collected until it is told."""

    def __init__(self, server: int, generation: int, intervals: int) -> None:
        self._server, self._generation, self._intervals = server, generation, intervals
        self._losses: dict[int, dict[int, tuple[float, int]]] = {}
        """By epoch and interval, so that the sum has one order."""
        self._evaluations: dict[int, dict[int, tuple[int, ...]]] = {}
        self._ended: dict[int, float] = {}
        self._urgent = asyncio.Event()
        self.refused = 0
        self._seconds, self._tasks = 0.0, 0

    def loss(self, now: Pass, interval: int, outcome: Outcome) -> None:
        """The last AV of an interval."""
        if now.train:
            self._losses.setdefault(now.epoch, {})[interval] = (outcome.loss, outcome.counts[0])
            return
        self._evaluations.setdefault(now.epoch, {})[interval] = outcome.counts
        if len(self._evaluations[now.epoch]) == self._intervals:
            self._urgent.set()

    def passed(self, number: int, now: float) -> None:
        self._ended[number] = now

    def worked(self, seconds: float) -> None:
        self._seconds += seconds
        self._tasks += 1

    async def something(self) -> None:
        """Wait for something that somebody waits for; anything else is told now and then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_S):
                await self._urgent.wait()
        self._urgent.clear()

    def report(self, board: Board, workers: int) -> Report:
        """All that is complete and has not been told."""
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
        ended, self._ended = self._ended, {}
        return Report(
            generation=self._generation,
            server=self._server,
            losses=losses,
            evaluations=counts,
            ended=ended,
            queue=board.queue("worker"),
            running=board.busy,
            workers=workers,
            spread=board.spread,
            relaunches=board.relaunches,
            refused=self.refused,
            worker_seconds=self._seconds,
            worker_tasks=self._tasks,
            finished=board.finished,
        )
