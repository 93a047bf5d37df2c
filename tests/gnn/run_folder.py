"""Readers of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gnn.fake_worker import process_ends


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def all_processes_ended(folder: Path) -> bool:
    pids = [e["pid"] for e in read_events(folder) if "pid" in e]
    return bool(pids) and all(map(process_ends, pids))
