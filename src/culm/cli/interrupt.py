"""Ctrl-C, SIGTERM and a terminal that goes end a command as anything else does: all that it started is ended first."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from culm.errors import RunError

T = TypeVar("T")


def _signals() -> tuple[signal.Signals, ...]:
    """What ends a run from outside; also in the background of a script, where Ctrl-C is ignored until somebody listens.
    Under nohup it outlives its terminal."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hangs_up else ()))


class Interrupted(RunError):
    """A signal ended the run."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextlib.contextmanager
def terminable(ended: Callable[[int], str]) -> Iterator[None]:
    """While no loop runs: SIGTERM raises Interrupted, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, frame: object) -> None:
        del frame
        raise Interrupted(number, ended(number))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def interruptible(main: Coroutine[Any, Any, T], ended: Callable[[int], str]) -> T:
    """Run to the end, or until a signal: then `main` is cancelled, and Interrupted raised with what `ended` says of it.

    From the first moment on: what is started in `main` is ended there too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _signals())  # until the loop can hear them
    return asyncio.run(_heeding(main, ended))


async def _heeding(main: Coroutine[Any, Any, T], ended: Callable[[int], str]) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    heard: list[int] = []

    def stop(number: int) -> None:
        """Only once: `timeout` and terminals send it twice, and what is being ended must not be disturbed."""
        if not heard:
            task.cancel()
        heard.append(number)

    for number in (signals := _signals()):
        loop.add_signal_handler(number, stop, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        return await task
    except (asyncio.CancelledError, RunError):
        if not heard:
            raise
        raise Interrupted(heard[0], ended(heard[0])) from None
