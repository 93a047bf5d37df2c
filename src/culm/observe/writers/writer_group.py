"""The extra writers of a run: each in a thread of its own, so that neither an error nor a delay reaches the leader."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from culm.errors import USER_EXCEPTIONS, message_suffix
from culm.observe.writers.writer_registry import create_writer

if TYPE_CHECKING:
    from culm.observe.step_metrics import StepMetrics
    from culm.observe.writers.writer import RunInfo, Writer

WriterCall: TypeAlias = "Callable[[Writer], None]"
CLOSE_TIMEOUT_S = 30.0
"""How long `close` waits for a writer: an upload may take a while, a writer that hangs must not keep the run alive."""


class WriterFailure(NamedTuple):
    """A writer that raised or did not finish, and why."""

    writer: str
    why: str


class WriterGroup:
    """Passes steps and events to writers by name. No method raises for a writer; `take_failures` says what failed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(dict.fromkeys(names))
        self._threads: list[_WriterThread] = []

    def open(self, run: RunInfo) -> None:
        """Create and open the writers, without waiting for them."""
        self._threads = [_WriterThread(name) for name in self._names]
        self._submit(lambda writer: writer.open(run))

    def write_step(self, metrics: StepMetrics) -> None:
        self._submit(lambda writer: writer.write_step(metrics))

    def write_event(self, event: Mapping[str, Any]) -> None:
        self._submit(lambda writer: writer.write_event(event))

    def _submit(self, call: WriterCall) -> None:
        for thread in self._threads:
            thread.submit(call)

    def take_failures(self) -> list[WriterFailure]:
        """The failures since the last call; each writer fails at most once."""
        return [failure for thread in self._threads if (failure := thread.take_failure()) is not None]

    def close(self, summary: Mapping[str, Any] | None, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the writers and wait for them, at most `timeout_s` for each."""
        for thread in self._threads:
            thread.finish(lambda writer: writer.close(summary))
        for thread in self._threads:
            thread.wait(timeout_s)

    @property
    def is_open(self) -> bool:
        """Whether a writer was opened and is not closed yet."""
        return any(not thread.finished for thread in self._threads)


class _WriterThread:
    """One writer: created, called and closed in one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[WriterCall | None] = queue.SimpleQueue()
        self._failure: WriterFailure | None = None
        self._failed = self.finished = False
        self._thread = threading.Thread(target=self._run, name=f"culm-writer-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: WriterCall) -> None:
        if not self._failed and not self.finished:
            self._calls.put(call)

    def finish(self, call: WriterCall) -> None:
        """Make the last call, after which the thread ends."""
        self.submit(call)
        self.finished = True
        self._calls.put(None)

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive() and not self._failed:
            self._fail(f"it did not finish within {timeout_s:g} s")

    def take_failure(self) -> WriterFailure | None:
        failure, self._failure = self._failure, None
        return failure

    def _run(self) -> None:
        try:
            writer = create_writer(self._name)
            while (call := self._calls.get()) is not None:
                call(writer)
        except USER_EXCEPTIONS as error:
            self._fail(f"{type(error).__name__}{message_suffix(error)}")

    def _fail(self, why: str) -> None:
        self._failed, self._failure = True, WriterFailure(self._name, why)
