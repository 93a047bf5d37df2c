"""What the folder of a run says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gnn.launch_standin import ended


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def nobody_left(folder: Path) -> bool:
    pids = [e["pid"] for e in events(folder) if "pid" in e]
    return bool(pids) and all(map(ended, pids))
