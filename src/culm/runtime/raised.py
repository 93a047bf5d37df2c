"""What code of the user may raise while a loop runs."""

from __future__ import annotations

from asyncio import CancelledError

from culm import errors

RAISED: tuple[type[BaseException], ...] = (*errors.RAISED, CancelledError)
"""Let through, the last one would mean that somebody ended the coroutine."""
