"""Cost of lost servers: one row per recovery, from the first sign of the loss to the epoch that had been reached.
Pure.

An epoch here is a training epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class _OpenRecovery:
    """A recovery in progress, with the times of its stages."""

    first_sign_at: float
    lost_servers: list[str] = field(default_factory=list)
    known_at: float = 0.0
    decided_at: float = 0.0
    members_complete_at: float = 0.0
    version: int = 0
    epochs_done: int = 0
    """Epochs that were done before the loss. Those from `version` on are repeated."""


@dataclass
class ServerRecoveries:
    """Collects recoveries and returns rows of summary.json. Servers that are lost at the same time share one
    recovery."""

    _open: _OpenRecovery | None = None
    _closed_rows: list[dict[str, Any]] = field(default_factory=list)

    def record_first_sign(self, now: float) -> None:
        """Record a broken connection or an ended process. The first sign opens the recovery."""
        if self._open is None or self._open.members_complete_at:
            self._close_recovery(now)
            self._open = _OpenRecovery(now)

    def record_server_lost(self, server_id: str, now: float) -> None:
        """Record that a server's session has ended."""
        self.record_first_sign(now)
        assert self._open is not None
        self._open.known_at = self._open.known_at or now
        self._open.lost_servers.append(server_id)

    def record_generation_start(self, now: float, version: int, epochs_done: int) -> None:
        """Record the start of a generation from a version of the weights, after `epochs_done` epochs."""
        if self._open is not None:
            self._open.decided_at, self._open.version, self._open.epochs_done = now, version, epochs_done

    def record_members_complete(self, now: float) -> None:
        """Record that all servers of the generation are connected."""
        if self._open is not None and self._open.decided_at:
            self._open.members_complete_at = now
            self.record_epochs_done(self._open.version, now)

    def record_epochs_done(self, epochs: int, now: float) -> None:
        """Record the number of completed epochs; closes the recovery when the former progress is reached."""
        if self._open is not None and self._open.members_complete_at and epochs >= self._open.epochs_done:
            self._close_recovery(now)

    def _close_recovery(self, now: float) -> None:
        if self._open is not None and self._open.lost_servers:
            self._closed_rows.append(_summary_row(self._open, now))
        self._open = None

    def summary_rows(self, now: float) -> list[dict[str, Any]]:
        """Return the rows of all recoveries; one in progress ends at `now`."""
        return [
            *self._closed_rows,
            *([_summary_row(self._open, now)] if self._open is not None and self._open.lost_servers else []),
        ]


def _summary_row(recovery: _OpenRecovery, now: float) -> dict[str, Any]:
    decided = recovery.decided_at or now
    members_complete = recovery.members_complete_at or now
    return {
        "step": recovery.version,
        "lost": list(recovery.lost_servers),
        "detect_ms": _ms(recovery.first_sign_at, recovery.known_at),
        "decide_ms": _ms(recovery.known_at, decided),
        "move_ms": _ms(decided, members_complete),
        "redo_ms": _ms(members_complete, now),
        "redone_actions": max(0, recovery.epochs_done - recovery.version),
        "source": "checkpoint",
    }


def _ms(start: float, end: float) -> float:
    return round(max(0.0, end - start) * 1e3, 1)
