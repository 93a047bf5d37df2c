"""Virtual time: an asyncio event loop whose clock jumps to the next timer when nobody has anything to do."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

A = ParamSpec("A")
T = TypeVar("T")


class Deadlock(Exception):
    """Everybody waits and no timer is set: in the real world this run would hang for ever."""


class _NoWaiting(selectors.SelectSelector):
    """A selector that never sleeps: it moves the virtual clock instead."""

    def __init__(self, loop_time: list[float]) -> None:
        super().__init__()
        self._time = loop_time

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("every coroutine waits and no timer is set")
        self._time[0] += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic: callbacks run in the order in which they were asked for, timers in the order of their time.

    Nothing of the outside is heard: threads and sockets have no place in virtual time.
    """

    def __init__(self) -> None:
        self._virtual = [0.0]
        super().__init__(_NoWaiting(self._virtual))

    def time(self) -> float:
        return self._virtual[0]


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time; what is still running then is cancelled. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """The clock of a simulated cluster. `cost` says how many virtual seconds an action of a node takes."""

    def __init__(self, cost: Callable[[int, int, str], float] | None = None) -> None:
        self._cost = cost or (lambda *_: 0.0)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def work(self, node: int, step: int, action: str) -> None:
        await asyncio.sleep(self._cost(node, step, action))

    async def aside(self, slow: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        await asyncio.sleep(0)
        return slow(*args, **kwargs)
