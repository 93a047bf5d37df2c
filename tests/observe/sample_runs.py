"""Runs that never were, told in the words of their files."""

from __future__ import annotations

from typing import Any

from culm.observe.report.load_run import PerfettoEvent, PerfettoTrace, RunContents
from culm.observe.step_metrics import StepMetrics

START = {
    "t": 0.1, "kind": "run_started", "node": None, "job": "gpt.py", "nodes": 3, "pipelines": 3, "stages": 1,
    "schedule": "1f1b", "strategy": "reroute", "exact": True, "global_batch": 8, "start": 0, "steps": 10,
    "why": "asked", "timeouts": {"suspect_after": 5.0},
}  # fmt: skip
RECOVERED = {
    "step": 4, "lost": [2], "detect_ms": 40.0, "decide_ms": 30.0, "move_ms": 20.0, "redo_ms": 10.0,
    "redone_actions": 3, "source": "peers",
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    START,
    *({"t": 0.2, "kind": "node_joined", "node": node} for node in range(3)),
    {"t": 0.3, "kind": "epoch", "node": None, "number": 1, "members": [0, 1, 2], "slots": ["0.0", "1.0", "2.0"]},
    *({"t": 0.5, "kind": "ready", "node": node, "seconds": 0.1} for node in range(3)),
    {"t": 4.6, "kind": "lost", "node": 2, "step": 4},
    {
        "t": 4.7,
        "kind": "epoch",
        "node": None,
        "number": 2,
        "members": [0, 1],
        "slots": ["0.0", "1.0"],
        "why": "it went",
    },
    {"t": 4.8, "kind": "recovered", "node": None, **RECOVERED},
    {"t": 5.0, "kind": "checkpoint", "node": None, "step": 4, "bytes": 1000},
    {"t": 6.0, "kind": "node_joined", "node": 3},
    {"t": 7.0, "kind": "notice", "node": 1, "seconds": 30.0},
]
SUMMARY: dict[str, Any] = {
    "steps": 10, "samples": 80, "samples_expected": 80, "samples_lost": 0, "samples_duplicated": 0, "wall_s": 10.0,
    "start_s": 0.5, "goodput": 8.0, "strategy": "reroute", "pipelines": 3, "stages": 1, "schedule": "1f1b",
    "exact": True, "final_loss": 0.1, "weights_sha256": "ab" * 32, "state_sha256": "cd" * 32, "preemptions": 1,
    "recoveries": [RECOVERED], "cost_usd": 0.0, "checkpoints": [4],
}  # fmt: skip
TRACE = PerfettoTrace(
    [
        PerfettoEvent("M", "thread_name", args={"name": "node 0: pipeline 0 stage 0"}),
        *(PerfettoEvent("X", f"0{kind}0", ts=1e4 * i, dur=9e3, args={"step": 9}) for i, kind in enumerate("FBIWRS")),
    ]
)


def steps(count: int, first: int = 0, began: float = 0.5) -> list[StepMetrics]:
    return [StepMetrics(n, began + n + 1 - first, 1.0 / (n + 1), 8) for n in range(first, first + count)]


def contents(**changes: Any) -> RunContents:
    """A run of ten steps that lost a node in the fourth, and is done."""
    finished = {"t": 10.6, "kind": "finished", "node": None, "steps": 10, "samples": 80}
    told = {"name": "a", "summary": SUMMARY, "steps": steps(10), "events": [*EVENTS, finished], "idle_s": 5.0}
    return RunContents(**{**told, **changes})
