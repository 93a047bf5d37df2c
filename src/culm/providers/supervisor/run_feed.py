"""RunFeed: passes everything that a run shows on to its windows, and keeps it for windows that are opened later."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING

from culm.providers.supervisor.window_messages import (
    EventShown,
    HistoryEnded,
    OutputShown,
    ProgressShown,
    RunEnded,
    RunNamed,
    SetupShown,
    StepShown,
    ToWindow,
    UrlShown,
    encode_frame,
)

if TYPE_CHECKING:
    from culm.cluster.run_setup import RunSetup
    from culm.observe.step_metrics import StepMetrics

_KEPT_STEPS = 1000
_KEPT_LINES = 10_000
"""Events and lines of user code that are kept for later windows."""
_MAX_UNREAD_BYTES = 8 << 20
"""A window that leaves more than this unread, because it is stopped, misses progress, steps and output."""
_CLOSE_TIMEOUT_S = 5.0
"""Limit for an attached window to read the end of the run."""


class WindowLink:
    """The connection to one window."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    def send(self, frame: bytes, *, must_arrive: bool = True) -> None:
        """Send without waiting: a window that is stopped does not hold up the run."""
        if self._writer.is_closing():
            return
        if must_arrive or self._writer.transport.get_write_buffer_size() < _MAX_UNREAD_BYTES:
            self._writer.write(frame)

    async def close(self, timeout_s: float | None = None) -> None:
        """Close the connection when the window has read everything, has ended, or `timeout_s` have passed."""
        self._writer.close()
        try:
            async with asyncio.timeout(timeout_s):
                with contextlib.suppress(ConnectionError):
                    await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()


class RunFeed:
    """The observer of a run whose windows are other processes."""

    def __init__(self, owner: WindowLink) -> None:
        """`owner`: the window that started the run."""
        self._owner = owner
        self._links = {owner}
        self._numbers = itertools.count()
        self._first: dict[type[ToWindow], bytes] = {}
        """Frames that every new window gets first: name, page, setup."""
        self._steps: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_STEPS)
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=_KEPT_LINES)

    def show_name(self, name: str) -> None:
        self._show_first(RunNamed(name))

    def show_progress(self, text: str, done: int, total: int) -> None:
        self._send(encode_frame(ProgressShown(text, done, total)), must_arrive=False)

    def show_setup(self, setup: RunSetup) -> None:
        self._show_first(SetupShown(setup))

    def show_url(self, url: str) -> None:
        self._show_first(UrlShown(url))

    def show_step(self, metrics: StepMetrics) -> None:
        frame = encode_frame(StepShown(metrics, time.time()))
        self._steps.append((next(self._numbers), frame))
        self._send(frame, must_arrive=False)

    def show_event(self, text: str) -> None:
        self._show_line(EventShown(text, time.time()))

    def show_notice(self, text: str) -> None:
        self._show_line(EventShown(text, time.time(), is_notice=True))

    def show_output(self, text: str) -> None:
        self._show_line(OutputShown(text, time.time()), must_arrive=False)

    def _show_first(self, message: ToWindow) -> None:
        self._first[type(message)] = frame = encode_frame(message)
        self._send(frame)

    def _show_line(self, message: EventShown | OutputShown, *, must_arrive: bool = True) -> None:
        frame = encode_frame(message)
        self._lines.append((next(self._numbers), frame))
        self._send(frame, must_arrive=must_arrive)

    def _send(self, frame: bytes, *, must_arrive: bool = True) -> None:
        for link in self._links:
            link.send(frame, must_arrive=must_arrive)

    def add_window(self, link: WindowLink) -> None:
        """Show the run to another window: first what happened before, then everything new."""
        link.send(self.history() + encode_frame(HistoryEnded()))
        self._links.add(link)

    def remove_window(self, link: WindowLink) -> None:
        self._links.discard(link)

    def history(self) -> bytes:
        """What was shown so far, as frames: all but the oldest steps and lines."""
        return b"".join([*self._first.values(), *(frame for _, frame in sorted([*self._steps, *self._lines]))])

    async def end(self, ended: RunEnded) -> None:
        """Show the end of the run, and wait until the windows have read it. A launcher that is stopped is waited for
        until it continues or dies; other windows only for a few seconds."""
        self._send(encode_frame(ended))
        await asyncio.gather(*(link.close(None if link is self._owner else _CLOSE_TIMEOUT_S) for link in self._links))
