"""Errors that show the workers' action lists with the invalid cells marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.errors import ScheduleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.schedule.plan import Plan

_CELLS_AROUND_MARK = 8
"""Cells shown on either side of a mark: enough to see the pattern, few enough for a terminal."""


def error_at_cells(plan: Plan, sentence: str, notes_by_cell: Mapping[tuple[int, int], str]) -> ScheduleError:
    """Return the error to raise. `notes_by_cell` maps (worker, index) to the problem; an index past the end is a
    missing action."""
    columns = [index for _, index in notes_by_cell]
    window = range(max(0, min(columns) - _CELLS_AROUND_MARK), max(columns) + _CELLS_AROUND_MARK + 1)
    rows = [_marked_row(plan, worker, window, notes_by_cell) for worker in range(len(plan.workers))]
    return ScheduleError("\n".join([sentence, *rows]))


def _marked_row(plan: Plan, worker: int, window: range, notes_by_cell: Mapping[tuple[int, int], str]) -> str:
    actions = plan.workers[worker]
    label = f"  {plan.slot_label(worker)}: "
    cells = ["..."] if window.start and actions else []
    for index in window:
        note = notes_by_cell.get((worker, index))
        text = str(actions[index]) if index < len(actions) else ""
        if note is not None:
            # The note ends the line, next to its cell; the rest of the list continues on the next line.
            text = f"[{text}] <-- here: {note}\n{' ' * (len(label) - 1)}"
        cells += [text] if text else []
    cells += ["..."] if window.stop < len(actions) else []
    return (label + " ".join(cells)).rstrip()
