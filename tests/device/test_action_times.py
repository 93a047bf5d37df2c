"""Times of actions on the clock of the host stay accurate over days, although the driver gives them with 24 bits and
the clocks differ."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

from culm.device.device_copies import DeviceCopies
from culm.device.simulated_streams import SimulatedStreams
from culm.runtime.launched_actions import LaunchedAction, LaunchedActions

DRIFT = 2e-5
"""The clock of the device is faster by this."""


class DriverEvent:
    """An event at a time of the device, which gives the milliseconds between two events as a float of 32 bits."""

    def __init__(self, host_s: float) -> None:
        self.at_ms = 1e3 * host_s * (1 + DRIFT)

    def is_complete(self) -> bool:
        return True

    async def wait(self) -> None:
        return

    def seconds_since(self, earlier: Any) -> float:
        (elapsed,) = struct.unpack("f", struct.pack("f", self.at_ms - earlier.at_ms))
        return float(elapsed) / 1e3


def test_the_time_of_an_action_is_accurate_after_two_days() -> None:
    async def main() -> None:
        now = 0.0
        copies = DeviceCopies(SimulatedStreams(0))
        spans: list[tuple[int, str, float, float]] = []
        state = SimpleNamespace(copies=copies, spans=spans, open_steps={}, evict_oldest=bool)
        clock = SimpleNamespace(now=lambda: now)

        async def after_action(step: int, label: str) -> None:
            pass

        actions = LaunchedActions(state, None, clock, 1, 0, after_action)  # type: ignore[arg-type]
        actions._reference = DriverEvent(0.0)
        for step in range(2 * 24 * 60):  # one action a minute
            launched = 60.0 * step
            computed = DriverEvent(launched + 0.010)
            now = launched + 0.0101
            actions.add(
                LaunchedAction(
                    step=step, label="0F0", work=None, launched_at=launched, event=computed, computed=computed
                )
            )
            await actions.wait_until_complete()
        for step, _, began, ended in (spans[100], spans[-1]):
            assert abs(ended - (60.0 * step + 0.010)) < 0.003
            assert 0.007 < ended - began < 0.013

    asyncio.run(main())
