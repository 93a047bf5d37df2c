"""Error messages that point: one sentence, then the lists of the workers with the offending cells marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.errors import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.schedule.plan import Plan

_AROUND = 8
"""Cells shown on either side of a mark: enough to see the pattern, short enough for a terminal."""


def refuse(plan: Plan, sentence: str, marks: Mapping[tuple[int, int], str]) -> ScheduleError:
    """The error to raise: `marks` says what is wrong with the cell (worker, index); an index past the end is a gap."""
    columns = [index for _, index in marks]
    window = range(max(0, min(columns) - _AROUND), max(columns) + _AROUND + 1)
    rows = [_row(plan, worker, window, marks) for worker in range(len(plan.workers))]
    return ScheduleError("\n".join([sentence, *rows]))


def _row(plan: Plan, worker: int, window: range, marks: Mapping[tuple[int, int], str]) -> str:
    actions = plan.workers[worker]
    label = f"  {plan.label(worker)}: "
    cells = ["..."] if window.start and actions else []
    for index in window:
        note = marks.get((worker, index))
        text = str(actions[index]) if index < len(actions) else ""
        if note is not None:
            # The arrow ends the line, next to its cell; the rest of the list goes on below.
            text = f"[{text}] <-- here: {note}\n{' ' * (len(label) - 1)}"
        cells += [text] if text else []
    cells += ["..."] if window.stop < len(actions) else []
    return (label + " ".join(cells)).rstrip()
