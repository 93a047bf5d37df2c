"""The exceptions that user code may raise while an event loop runs."""

from __future__ import annotations

from asyncio import CancelledError

from culm import errors

ASYNC_USER_EXCEPTIONS: tuple[type[BaseException], ...] = (*errors.USER_EXCEPTIONS, CancelledError)
"""Includes CancelledError: if user code raised one and it was not caught, asyncio would take the coroutine for
cancelled."""
