"""Retries of storage calls: with backoff, in a thread, and without waiting for a call that hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from culm.errors import RunError

if TYPE_CHECKING:
    from culm.runtime.clock import Clock

T = TypeVar("T")
STALL_S = 30.0
"""A storage call that takes longer has failed, unless it writes much data."""
SLOW_BYTES_PER_S = 10e6
"""Data slower than this has stalled."""
MISSING_FOLDER_S = 120.0
"""How long a folder that was there is expected back, as that of a disk that is not mounted. After that it is created
again, so that nothing is lost at the end of the run."""
_FIRST_RETRY_S = 0.25
_MAX_RETRY_S = 10.0


def stall_timeout_s(size: int) -> float:
    """Seconds after which a write of that many bytes counts as failed."""
    return STALL_S + size / SLOW_BYTES_PER_S


async def retry_storage(
    clock: Clock, call: Callable[[], T], on_failure: Callable[[str, bool], None], stall_s: float = STALL_S
) -> T:
    """Call a function in a thread until it succeeds, and return its result.

    `on_failure(reason, stalled)` is called for every attempt that raises RunError or OSError, and with stalled=True for
    an attempt that has not returned after `stall_s` seconds. There is one attempt at a time: the next one starts after
    the former has returned. Raises other errors of the function at once.
    """
    delay = _FIRST_RETRY_S
    while True:
        attempt = asyncio.ensure_future(clock.run_in_thread(call))
        try:
            if not (await asyncio.wait([attempt], timeout=stall_s))[0]:
                on_failure(f"it has not answered for {stall_s:.0f} s", True)
                await asyncio.wait([attempt])
            return attempt.result()
        except (RunError, OSError) as error:
            on_failure(str(error), False)
        finally:
            attempt.cancel()
        await clock.sleep(delay)
        delay = min(2 * delay, _MAX_RETRY_S)
