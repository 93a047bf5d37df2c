"""`culm bench planner`: how far greedy plans are from proved optima, and how long planning takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks.planner.proved_optima import OPTIMA_FILE, case_from_row
from rich import box
from rich.table import Table

from culm.plan import PlanCase, Slot, plan_greedy
from culm.plan.replan.greedy_planner import clear_plan_caches
from culm.schedule import Costs

SMALL_CASE = PlanCase(pipelines=4, stages=8, micro_batches=64, failed=frozenset({Slot(3, 5)}), memory="1f1b")
"""16 micro-batches per pipeline, a failure and a cap: the bound is not met, so every rule is tried."""

_UNEQUAL_COSTS = tuple(1.0 + 0.1 * (stage % 3) for stage in range(16))
LARGE_CASE = PlanCase(
    pipelines=64,
    stages=16,
    micro_batches=64 * 64,
    costs=Costs(forward=_UNEQUAL_COSTS, input=_UNEQUAL_COSTS[::-1], weight=0.9, reduce=2.0, step=0.5, send=0.2),
    memory="1f1b",
)
"""1,024 workers, 64 micro-batches per pipeline, costs that differ by stage, communication, and a cap."""


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Run the bench. Times are the minimum of several rounds, because other processes can only add to them."""
    rounds = 3 if quick else 9
    progress("greedy plans beside proved optima")
    gaps = _optimality_gaps(json.loads(OPTIMA_FILE.read_text(encoding="utf-8")))
    progress("planning 4 x 8 with 16 micro-batches per pipeline")
    small = _min_seconds(lambda: plan_greedy(SMALL_CASE), rounds, before=clear_plan_caches)
    progress("planning 1,024 workers")
    large = _min_seconds(lambda: plan_greedy(LARGE_CASE), rounds, before=clear_plan_caches)
    plan_greedy(LARGE_CASE)
    progress("planning them again after a failure")
    replan = _min_seconds(lambda: plan_greedy(replace(LARGE_CASE, failed=frozenset({Slot(17, 7)}))), rounds)
    return {
        "gap_mean": mean(gaps),
        "gap_max": max(gaps),
        "optima": len(gaps),
        "at_optimum": sum(gap < 1e-9 for gap in gaps) / len(gaps),
        "ms_4x8x16": 1e3 * small,
        "s_1024": large,
        "replan_s_1024": replan,
        "rounds": rounds,
    }


def render_table(result: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_row(f"greedy above the optimum, mean of {result['optima']} cases", f"{result['gap_mean']:.2%}")
    table.add_row("greedy above the optimum, worst", f"{result['gap_max']:.1%}")
    table.add_row("cases in which greedy is optimal", f"{result['at_optimum']:.0%}")
    table.add_row("4 x 8, 16 micro-batches per pipeline, a failure, capped", f"{result['ms_4x8x16']:.1f} ms")
    table.add_row("1,024 workers, 64 per pipeline, costs and cap", f"{result['s_1024']:.3f} s")
    table.add_row("planned again after a failure", f"{result['replan_s_1024']:.3f} s")
    return table


def _optimality_gaps(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [max(0.0, plan_greedy(case_from_row(row)).step_time / row["optimum"] - 1) for row in rows]


def _min_seconds(call: Callable[[], object], rounds: int, before: Callable[[], None] = lambda: None) -> float:
    seconds = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
