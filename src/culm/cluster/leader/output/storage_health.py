"""Storage health: which writes of a run fail, since when, and what waits for them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

FINAL_RETRY_S = 600.0
"""How long the last checkpoint and the summary are retried after the last step."""

_FIRST_PROGRESS_S = 5.0
PROGRESS_S = 60.0
"""Time between two events while the end of the run waits for storage."""


class StorageFailure(NamedTuple):
    """A write that fails."""

    path: str
    why: str
    delayed: str
    """What waits for the storage."""
    since: float


class LogEvent(Protocol):
    """Logs an event of the run."""

    def __call__(self, kind: str, **fields: Any) -> None: ...


class StorageHealth:
    """The failing writes of a run by name. Logs `storage_failed` when the first write to a path fails, and
    `storage_recovered` when the last one succeeds again."""

    def __init__(self, now: Callable[[], float], log_event: LogEvent) -> None:
        self._now, self._log_event = now, log_event
        self._failures: dict[str, StorageFailure] = {}
        self._skipped: set[int] = set()
        self._dropped_lines = 0
        self._ended_at: float | None = None
        """When the storage was seen failing after the last step; None: the run trains."""
        self._progress_at = 0.0

    @property
    def is_failing(self) -> bool:
        return bool(self._failures)

    def failing_s(self, path: str) -> float:
        """How long a write to a path has failed by now; 0: none fails."""
        return max(
            (self._now() - failure.since for failure in self._failures.values() if failure.path == path), default=0.0
        )

    def record_failure(self, name: str, path: str, why: str, delayed: str) -> None:
        """A write failed. Repeated failures of a write only update its reason."""
        since = self._failures[name].since if name in self._failures else self._now()
        first = all(failure.path != path for failure in self._failures.values())
        self._failures[name] = StorageFailure(path, why, delayed, since)
        if first:
            self._log_event("storage_failed", path=path, why=why, delayed=delayed)

    def record_skipped(self, step: int) -> None:
        """The checkpoint of a step was given up."""
        self._skipped.add(step)

    def record_recovery(self, name: str, dropped_lines: int = 0) -> None:
        """A write succeeded. Does nothing if it did not fail before."""
        failure = self._failures.pop(name, None)
        self._dropped_lines += dropped_lines
        if failure is None or any(other.path == failure.path for other in self._failures.values()):
            return
        fields: dict[str, Any] = {"path": failure.path, "seconds": round(self._now() - failure.since, 3)}
        if self._skipped:
            fields["skipped_checkpoints"] = sorted(self._skipped)
        if self._dropped_lines:
            fields["dropped_lines"] = self._dropped_lines
        self._skipped, self._dropped_lines = set(), 0
        self._log_event("storage_recovered", **fields)

    def describe(self) -> str:
        """The first failing write as a phrase."""
        return next((_unwritten(failure) for failure in self._failures.values()), "the storage does not answer")

    def forget_workers(self, workers: Collection[int]) -> None:
        """Drop failures of workers that are gone."""
        for worker in workers:
            self.record_recovery(shard_write_name(worker))

    def note_training(self, *, done: bool) -> None:
        """Record whether all steps are committed. If a write still fails then, log every PROGRESS_S how long the run
        waits for it."""
        if not done or not self._failures:
            self._ended_at = None
            return
        now = self._now()
        if self._ended_at is None:
            self._ended_at, self._progress_at = now, now + _FIRST_PROGRESS_S
        if now >= self._progress_at:
            self._progress_at = now + PROGRESS_S
            failure = next(iter(self._failures.values()))
            left = FINAL_RETRY_S - (now - self._ended_at)
            delayed = f"all steps are done; {failure.delayed} (for another {left:.0f} s)"
            self._log_event("storage_failed", path=failure.path, why=failure.why, delayed=delayed)

    def give_up_reason(self, timeout_s: float | None) -> str | None:
        """Why the run must end: a write has failed for longer than `timeout_s`, or since the end of training for longer
        than FINAL_RETRY_S. None: it goes on."""
        now = self._now()
        for failure in self._failures.values():
            if timeout_s is not None and now - failure.since > timeout_s:
                return f"{_unwritten(failure)} for {now - failure.since:.0f} s (storage_timeout is {timeout_s:g})"
            if self._ended_at is not None and now - max(self._ended_at, failure.since) > FINAL_RETRY_S:
                return f"all steps are done, but {_unwritten(failure)} for {now - failure.since:.0f} s"
        return None


def shard_write_name(worker: int) -> str:
    """The name of a worker's checkpoint shard writes."""
    return f"shard {worker}"


def _unwritten(failure: StorageFailure) -> str:
    return f"{failure.delayed} could not be written to {failure.path} ({failure.why})"
