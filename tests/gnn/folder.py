"""What the folder of a run says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def nobody_left(folder: Path) -> bool:
    pids = [e["pid"] for e in events(folder) if "pid" in e]
    return bool(pids) and not any(map(alive, pids))


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
