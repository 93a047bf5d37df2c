"""`culm bench planner`: how far greedy plans are from proved optima, and how long planning takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.optima import FILE, case_of
from culm.plan import Case, Slot, greedy
from culm.plan.greedy import forget
from culm.schedule import Costs

SMALL = Case(pipelines=4, stages=8, micro_batches=64, failed=frozenset({Slot(3, 5)}), memory="1f1b")
"""16 micro-batches per pipeline, a failure and a cap: the bound is not met, so every rule is tried."""

_UNEVEN = tuple(1.0 + 0.1 * (stage % 3) for stage in range(16))
LARGE = Case(
    pipelines=64,
    stages=16,
    micro_batches=64 * 64,
    costs=Costs(forward=_UNEVEN, input=_UNEVEN[::-1], weight=0.9, reduce=2.0, step=0.5, send=0.2),
    memory="1f1b",
)
"""1,024 workers, 64 micro-batches per pipeline, costs by stage, communication, and a cap."""


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The figures of the bench. Times are the least of some rounds: others on the machine only add to it."""
    rounds = 3 if quick else 9
    progress("greedy plans beside proved optima")
    gaps = _gaps(json.loads(FILE.read_text(encoding="utf-8")))
    progress("planning 4 x 8 with 16 micro-batches per pipeline")
    small = _seconds(lambda: greedy(SMALL), rounds, before=forget)
    progress("planning 1,024 workers")
    large = _seconds(lambda: greedy(LARGE), rounds, before=forget)
    greedy(LARGE)
    progress("planning them again after a failure")
    again = _seconds(lambda: greedy(replace(LARGE, failed=frozenset({Slot(17, 7)}))), rounds)
    return {
        "gap_mean": mean(gaps),
        "gap_max": max(gaps),
        "optima": len(gaps),
        "at_optimum": sum(gap < 1e-9 for gap in gaps) / len(gaps),
        "ms_4x8x16": 1e3 * small,
        "s_1024": large,
        "replan_s_1024": again,
        "rounds": rounds,
    }


def table(result: dict[str, Any]) -> Table:
    """The figures for people."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("what")
    made.add_column("figure", justify="right")
    made.add_row(f"greedy above the optimum, mean of {result['optima']} cases", f"{result['gap_mean']:.2%}")
    made.add_row("greedy above the optimum, worst", f"{result['gap_max']:.1%}")
    made.add_row("cases in which greedy is optimal", f"{result['at_optimum']:.0%}")
    made.add_row("4 x 8, 16 micro-batches per pipeline, a failure, capped", f"{result['ms_4x8x16']:.1f} ms")
    made.add_row("1,024 workers, 64 per pipeline, costs and cap", f"{result['s_1024']:.3f} s")
    made.add_row("planned again after a failure", f"{result['replan_s_1024']:.3f} s")
    return made


def _gaps(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [max(0.0, greedy(case_of(row)).slots / row["optimum"] - 1) for row in rows]


def _seconds(work: Callable[[], object], rounds: int, before: Callable[[], None] = lambda: None) -> float:
    spent = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        work()
        spent.append(time.perf_counter() - start)
    return min(spent)
