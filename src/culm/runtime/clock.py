"""Time as a parameter."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

A = ParamSpec("A")
T = TypeVar("T")


class Clock(Protocol):
    """Seconds that only grow. Real: the machine's. Simulated: virtual, and it jumps when nobody has anything to do."""

    def now(self) -> float:
        """Seconds since some moment, the same for all nodes of a machine or of a simulation."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def work(self, node: int, step: int, action: str) -> None:
        """Called after each action, before anybody hears of it: here a simulated action takes its time, and faults
        strike. Real work has taken its time already."""

    async def aside(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run a slow call of the outside (a disk) without holding anybody up."""


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def work(self, node: int, step: int, action: str) -> None:
        del node, step, action

    async def aside(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        return await asyncio.to_thread(slow, *args, **kwargs)
