"""Line buffer: writes lines of steps.jsonl and events.jsonl in the background, and keeps them while that fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.observe.writers.run_folder import encode_line
from culm.runtime.storage_retry import retry_storage

if TYPE_CHECKING:
    from culm.observe.step_metrics import StepMetrics
    from culm.observe.writers.run_folder import RunFolder
    from culm.runtime.clock import Clock

MAX_LINES = 100_000
"""Lines that are kept while the storage fails; the oldest are dropped first."""


class _Line(NamedTuple):
    name: str
    data: bytes


class LineBuffer:
    """Writes to a run folder in order, in a thread, so that a storage that stalls does not block the event loop.

    Failed writes are retried until they succeed. `on_failure(reason)` is called for each, `on_recovery(dropped)` with
    the number of lines that did not fit into the buffer.
    """

    def __init__(
        self, folder: RunFolder, clock: Clock, on_failure: Callable[[str], None], on_recovery: Callable[[int], None]
    ) -> None:
        self.folder = folder
        self._clock, self._on_failure, self._on_recovery = clock, on_failure, on_recovery
        self._pending: deque[_Line | Callable[[], None]] = deque()
        """Lines, and calls of the folder that keep their place between them."""
        self._lines, self._dropped = 0, 0
        self._failing = False
        self._hangs = False
        """Whether nothing has been written since `flush_unless_hanging` has waited in vain."""
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def write_step(self, metrics: StepMetrics) -> None:
        self._add_line("steps.jsonl", metrics.to_fields())

    def write_event(self, event: Mapping[str, Any]) -> None:
        self._add_line("events.jsonl", event)

    def rewind(self, step: int) -> None:
        """Remove the lines of this step and later ones, after the lines before have been written."""
        self._add(partial(self.folder.rewind, step))

    def sync(self) -> None:
        """Copy the lines to a folder that is a URL, after the lines before."""
        self._add(self.folder.sync)

    def open(self) -> None:
        """Open the files before the lines that follow."""
        self._add(self.folder.open)

    @property
    def has_unsynced_lines(self) -> bool:
        """Whether lines have not been copied to a URL yet."""
        return self.folder.is_url and (self.folder.has_unsynced_lines or bool(self._pending))

    @property
    def is_written(self) -> bool:
        """Whether everything has been written."""
        return self._task is None or self._task.done()

    async def flush(self, timeout_s: float, *, despite_failure: bool = False) -> bool:
        """Wait until everything is written. Returns False after `timeout_s`, or at once if the storage fails, unless
        `despite_failure`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self.is_written and (despite_failure or not self._failing):
                    self._changed.clear()
                    await self._changed.wait()
        return self.is_written

    async def flush_unless_hanging(self, timeout_s: float) -> None:
        """Like `flush`. After a call that has waited in vain, the next ones return at once until a write succeeds."""
        if not self._hangs:
            self._hangs = not await self.flush(timeout_s)

    def close(self) -> None:
        """Give up what is not written, and close the files if no write hangs in them."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
        else:
            self.folder.close(sync=False)

    def _add_line(self, name: str, fields: Mapping[str, Any]) -> None:
        if self._lines >= MAX_LINES:
            oldest = next(entry for entry in self._pending if isinstance(entry, _Line))
            self._pending.remove(oldest)
            self._lines, self._dropped = self._lines - 1, self._dropped + 1
        self._lines += 1
        self._add(_Line(name, encode_line(fields)))

    def _add(self, entry: _Line | Callable[[], None]) -> None:
        if self.folder.out is None:
            return
        self._pending.append(entry)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._write_pending())

    async def _write_pending(self) -> None:
        try:
            while self._pending:
                for call in self._take_batch():
                    await retry_storage(self._clock, call, self._handle_failure)
                    self._handle_success()
        finally:
            asyncio.get_running_loop().call_soon(self._changed.set)  # when this task is done

    def _take_batch(self) -> list[Callable[[], None]]:
        """The calls for all lines up to the next other call, one for each file; or that call."""
        data: dict[str, bytes] = {}
        while self._pending and isinstance(entry := self._pending[0], _Line):
            self._pending.popleft()
            self._lines -= 1
            data[entry.name] = data.get(entry.name, b"") + entry.data
        if data:
            return [partial(self.folder.append, name, lines) for name, lines in data.items()]
        call = self._pending.popleft()
        assert not isinstance(call, _Line)
        return [call]

    def _handle_failure(self, why: str, stalled: bool) -> None:
        del stalled
        self._failing = True
        self._on_failure(why)
        self._changed.set()

    def _handle_success(self) -> None:
        self._hangs = False
        if self._failing:
            self._failing = False
            dropped, self._dropped = self._dropped, 0
            self._on_recovery(dropped)
