"""Schedules as data: who runs which action of a training step, and in what order.

    action     one piece of work, written 2F0, 1I3, 1W3, 1B3, 1R, 1S
    plan       actions placed on workers in order; reads and writes text and CSV
    generate   gpipe, 1f1b, zb, interleaved, and forwards alone
    check      every action once, dependencies, no deadlock, memory; errors point at the cell
    timing     when each action starts and ends, and the bubble
    show       a timeline as text, SVG or Perfetto trace
    lower      sends and receives, derived from the placement
    walk       the dry run behind check and timing; finds deadlocks
    marked     errors that show the lists with the cell marked

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.schedule.action import Action, Kind
from culm.schedule.check import Report, check
from culm.schedule.generate import SCHEDULES, forward_only, generate, gpipe, interleaved, one_f_one_b, zero_bubble
from culm.schedule.lower import Edge, Step, lower
from culm.schedule.plan import Plan, blocks
from culm.schedule.show import grid, perfetto, svg
from culm.schedule.timing import UNIT, Costs, Span, Timeline, timing

__all__ = [
    "SCHEDULES",
    "UNIT",
    "Action",
    "Costs",
    "Edge",
    "Kind",
    "Plan",
    "Report",
    "Span",
    "Step",
    "Timeline",
    "blocks",
    "check",
    "forward_only",
    "generate",
    "gpipe",
    "grid",
    "interleaved",
    "lower",
    "one_f_one_b",
    "perfetto",
    "svg",
    "timing",
    "zero_bubble",
]
