"""What the folder of a run says about it."""

from __future__ import annotations

import json
import os
import select
from pathlib import Path
from typing import Any

_MOMENT_S = 5.0


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def nobody_left(folder: Path) -> bool:
    pids = [e["pid"] for e in events(folder) if "pid" in e]
    return bool(pids) and all(map(_ended, pids))


def _ended(pid: int) -> bool:
    """Whether it has ended. One that was killed closes its files first, and is there a moment longer."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], _MOMENT_S)[0])
    finally:
        os.close(descriptor)


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
