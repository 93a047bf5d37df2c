"""The agent process of a machine: how its end is described, and what its files are called."""

from __future__ import annotations

import os
from pathlib import Path

from culm.providers.provider import describe_exit

_MAX_REASON = 200


def describe_agent_end(status: int | None, log: str) -> tuple[str, bool]:
    """(why an agent has ended, whether it is likely to repeat), from its exit status (None: not known, negative: a
    signal) and the end of its log."""
    if status == 0:
        return "its agent has left the run", False
    if status is None:
        return "its agent was killed", False
    if status > 128:  # as a shell reports a signal
        status = 128 - status
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = f": {lines[-1].removeprefix('culm: ')[:_MAX_REASON]}" if lines and status > 0 else ""
    return f"its agent {describe_exit(status)}{last}", status > 0


def log_end(path: Path, size: int = 4096) -> str:
    """The last part of a log; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
