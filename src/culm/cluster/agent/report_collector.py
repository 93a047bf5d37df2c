"""Report collector: an agent of a large cluster that sends the step reports of a pipeline to the leader together.

A leader of a thousand workers would otherwise read a thousand messages in every step. A report that is lost with its
collector is sent again in the next epoch, as one that is lost with the leader is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from culm.runtime import messages

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.transport.interface import Transport

COLLECT_S = 0.02
"""How long a report waits for the others at most."""


class ReportCollector:
    """Kept by every agent."""

    def __init__(self, transport: Transport, clock: Clock) -> None:
        self._transport, self._clock = transport, clock
        self._waiting: dict[tuple[str, int, int], list[messages.StepReport]] = {}
        """By leader, epoch and step."""
        self._timers: set[asyncio.Task[None]] = set()

    def add(self, message: messages.CollectReport) -> None:
        """Send a report on when those of all workers of its pipeline are there, or when it has waited long enough."""
        key = (message.leader, message.report.epoch, message.report.step)
        reports = self._waiting.setdefault(key, [])
        reports.append(message.report)
        if len(reports) >= message.expected:
            self._send(key)
        elif len(reports) == 1:
            timer = asyncio.create_task(self._send_later(key, reports))
            self._timers.add(timer)
            timer.add_done_callback(self._timers.discard)

    def _send(self, key: tuple[str, int, int]) -> None:
        leader = key[0]
        self._transport.send_message(leader, messages.encode(messages.ReportBundle(tuple(self._waiting.pop(key)))))

    async def _send_later(self, key: tuple[str, int, int], reports: list[messages.StepReport]) -> None:
        await self._clock.sleep(COLLECT_S)
        if self._waiting.get(key) is reports:
            self._send(key)

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
