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
        """Seconds since some moment, the same for all nodes of a run."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def work(self, node: int, step: int, action: str) -> None:
        """Called after each action, before anybody hears of it: here a simulated action takes its time, and faults
        strike. Real work has taken its time already."""

    async def aside(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run a slow call (of a disk, or that builds layers) without holding anybody up."""

    def struck_at(self, node: int) -> float | None:
        """When a node was struck on purpose; None: it was not, or nobody here knows when."""


class Blows(Protocol):
    """What strikes the process of a RealClock on purpose."""

    def reached(self, node: int, step: int, action: str) -> None:
        """An action is done and nobody has heard of it yet. Does not return if this is its process's last moment."""

    def struck_at(self, node: int) -> float | None:
        """See Clock."""


_EPOCH = time.time() - time.monotonic()
"""When this machine's monotonic clock was at zero. Looked at once: a clock that is set anew moves nothing."""


def real_now() -> float:
    """Seconds since 1970 that only grow. What workers say of when they were done, and a leader's record, are read on
    other machines: seconds since a machine was started would mean nothing there."""
    return _EPOCH + time.monotonic()


class RealClock:
    """The machine's monotonic clock, counted from where all machines agree, as far as their clocks do."""

    def __init__(self, blows: Blows | None = None) -> None:
        self._blows = blows

    def now(self) -> float:
        return real_now()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def work(self, node: int, step: int, action: str) -> None:
        if self._blows is not None:
            self._blows.reached(node, step, action)

    async def aside(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        return await asyncio.to_thread(slow, *args, **kwargs)

    def struck_at(self, node: int) -> float | None:
        return None if self._blows is None else self._blows.struck_at(node)
