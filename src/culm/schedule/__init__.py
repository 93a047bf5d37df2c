"""Schedules as data: which worker runs which action of a training step, and in what order.

    action              one unit of work, written 2F0, 1I3, 1W3, 1B3, 1R, 1S
    plan                actions assigned to workers in order; reads and writes text and CSV
    builtin_schedules   gpipe, 1f1b, zb, interleaved, and forward-only
    plan_check          every action once, dependencies, no deadlock, memory; errors mark the cell
    plan_timing         when each action starts and ends, and the bubble
    timeline_render     a timeline as text, SVG or Perfetto trace
    send_recv           sends and receives, derived from the placement
    dry_run             the dry run behind plan_check and plan_timing; detects deadlocks
    schedule_errors     errors that show the workers' lists with the cell marked

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.schedule.action import Action, Kind
from culm.schedule.builtin_schedules import (
    PROFILED_SCHEDULES,
    RUN_SCHEDULES,
    SCHEDULES,
    forward_only,
    generate_plan,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from culm.schedule.plan import Plan, split_micro_batches
from culm.schedule.plan_check import PlanReport, check_plan
from culm.schedule.plan_timing import UNIT_COSTS, ActionSpan, Costs, Timeline, time_plan
from culm.schedule.send_recv import ActionWithTransfers, TensorTransfer, derive_transfers
from culm.schedule.timeline_render import render_perfetto, render_svg, render_text

__all__ = [
    "PROFILED_SCHEDULES",
    "RUN_SCHEDULES",
    "SCHEDULES",
    "UNIT_COSTS",
    "Action",
    "ActionSpan",
    "ActionWithTransfers",
    "Costs",
    "Kind",
    "Plan",
    "PlanReport",
    "TensorTransfer",
    "Timeline",
    "check_plan",
    "derive_transfers",
    "forward_only",
    "generate_plan",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "render_perfetto",
    "render_svg",
    "render_text",
    "split_micro_batches",
    "time_plan",
    "zero_bubble",
]
