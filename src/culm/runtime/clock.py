"""The clock interface: time is a parameter, so that a simulation can replace it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

A = ParamSpec("A")
T = TypeVar("T")


class Clock(Protocol):
    """Monotonic seconds. RealClock uses the machine's clock. A simulated clock is virtual: it jumps forward when no
    coroutine can run."""

    @property
    def has_action_hooks(self) -> bool:
        """Whether `after_action` and `during_action` do anything. The executor asks once per epoch."""

    def now(self) -> float:
        """Seconds since a fixed moment that is the same for all nodes of a run."""

    async def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""

    async def after_action(self, node: int, step: int, action: str) -> None:
        """Called after each action, before its result is sent. A simulated action takes its time here, and faults are
        injected here. Real work has taken its time already."""

    def during_action(self, node: int, step: int, action: str) -> None:
        """Called inside each action, when it has computed and nothing is counted yet. A simulated error is raised
        here."""

    async def run_in_thread(self, function: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        """Run a slow function (disk access, building layers) in a thread, without blocking the event loop."""

    def killed_at(self, node: int) -> float | None:
        """When a node was killed by an injected fault; None: it was not, or the time is not known here."""


class InjectedError(Exception):
    """An error that a simulated clock raises inside an action. Its message counts as its location in the code."""


class FaultInjector(Protocol):
    """Injects faults into the process of a RealClock."""

    def on_action_done(self, node: int, step: int, action: str) -> None:
        """An action is done and its result was not sent yet. Does not return if the process is killed at this
        action."""

    def killed_at(self, node: int) -> float | None:
        """See Clock."""


_MONOTONIC_ZERO = time.time() - time.monotonic()
"""The time at which this machine's monotonic clock was zero. Read once: setting the system clock later has no
effect."""


def real_now() -> float:
    """Monotonic seconds since 1970. Times of step reports and of the leader's record are read on other machines, where
    seconds since the start of this machine would mean nothing."""
    return _MONOTONIC_ZERO + time.monotonic()


class RealClock:
    """The machine's monotonic clock, counted from 1970 as all machines do, as far as their system clocks agree."""

    def __init__(self, faults: FaultInjector | None = None) -> None:
        self._faults = faults

    @property
    def has_action_hooks(self) -> bool:
        return self._faults is not None

    def now(self) -> float:
        return _MONOTONIC_ZERO + time.monotonic()  # as real_now, without a second call: it is read for each action

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def after_action(self, node: int, step: int, action: str) -> None:
        if self._faults is not None:
            self._faults.on_action_done(node, step, action)

    def during_action(self, node: int, step: int, action: str) -> None:
        """Nothing: real errors come from the code of the action."""

    async def run_in_thread(self, function: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
        context = contextvars.copy_context()
        return await _run_in_daemon_thread(functools.partial(context.run, function, *args, **kwargs))

    def killed_at(self, node: int) -> float | None:
        return None if self._faults is None else self._faults.killed_at(node)


def _run_in_daemon_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Call a function in a thread of its own. The process can end while the call hangs, for example on a stalled mount;
    threads of asyncio's executor would be joined first."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            settle = functools.partial(_set_result, future, call())
        except BaseException as error:
            settle = functools.partial(_set_exception, future, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name="culm-call", daemon=True).start()
    return future


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # it may have been cancelled
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
