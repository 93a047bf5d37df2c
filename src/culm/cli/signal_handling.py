"""Signal handling: Ctrl-C, SIGTERM and a closed terminal end a command after everything it started has ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from culm.errors import RunError

T = TypeVar("T")


def _ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a run. SIGINT is included although scripts ignore it for background commands; SIGHUP only if
    it is not ignored, so that a run under nohup outlives its terminal."""
    handles_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if handles_hangup else ()))


class Interrupted(RunError):
    """The run was ended by a signal."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + number


@contextlib.contextmanager
def sigterm_raises(message_of: Callable[[int], str]) -> Iterator[None]:
    """While no event loop runs: SIGTERM raises Interrupted, as Ctrl-C raises KeyboardInterrupt."""

    def stop(number: int, frame: object) -> None:
        del frame
        raise Interrupted(number, message_of(number))

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_until_signal(
    main: Coroutine[Any, Any, T], message_of: Callable[[int], str], end_gracefully: Callable[[], bool] = lambda: False
) -> T:
    """Run `main` to its end or until a signal: then cancel it and raise Interrupted with the text of `message_of`.

    `end_gracefully` is called for every signal. If it returns True, `main` ends by itself and is not cancelled.

    Signals are handled from the start, so that everything started in `main` is also ended there.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _ending_signals())  # until the loop can handle them
    return asyncio.run(_run_with_handlers(main, message_of, end_gracefully))


async def _run_with_handlers(
    main: Coroutine[Any, Any, T], message_of: Callable[[int], str], end_gracefully: Callable[[], bool]
) -> T:
    loop = asyncio.get_running_loop()
    task = loop.create_task(main)
    received: list[int] = []
    cancelled = False

    def stop(number: int) -> None:
        """Cancel only once: `timeout` and terminals send the signal twice, and the cleanup must not be interrupted."""
        nonlocal cancelled
        received.append(number)
        if not cancelled and not end_gracefully():
            cancelled = True
            task.cancel()

    for number in (signals := _ending_signals()):
        loop.add_signal_handler(number, stop, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    try:
        result = await task
    except (asyncio.CancelledError, RunError):
        if not received:
            raise
        raise Interrupted(received[0], message_of(received[0])) from None
    if received:
        raise Interrupted(received[0], message_of(received[0]))
    return result
