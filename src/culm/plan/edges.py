"""What tasks wait for among each other: the edges of the graph of a step, for those that are still to be run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from culm.schedule import Action, Kind

_Name: TypeAlias = tuple[int, Kind, int, int | None]
"""(step, kind, segment, micro-batch): what an action leaves behind."""


class Task(NamedTuple):
    """An action of a step, on the list of a worker."""

    step: int
    action: Action
    again: bool = False
    """For its output alone."""


class Edge(NamedTuple):
    """A task that waits for another."""

    source: int
    target: int
    boundary: int | None
    """Which one lies between their segments; None: they are of one lot."""


def edges(tasks: Sequence[Task]) -> Iterator[Edge]:
    """Whatever is not in the list is there already."""
    made = {_made(task): number for number, task in enumerate(tasks)}
    for number, task in enumerate(tasks):
        own, other = _taken(task)
        source = made.get(own) if own is not None else None
        if source is not None and tasks[source].again == task.again:  # else it left no tape for this one
            yield Edge(source, number, None)
        source = made.get(other) if other is not None else None
        if source is not None and other is not None:
            yield Edge(source, number, min(other[2], task.action.segment))


def _made(task: Task) -> _Name:
    """What goes by the name of I, whether I or B made it, is the gradient."""
    segment, kind, micro = task.action
    return task.step, Kind.I if kind is Kind.B else kind, segment, micro


def _taken(task: Task) -> tuple[_Name | None, _Name | None]:
    """What a task takes of its own segment, and what of another."""
    step, (segment, kind, micro), _ = task
    if kind is Kind.F:
        return None, (step, Kind.F, segment - 1, micro)
    if kind is Kind.W:
        return (step, Kind.I, segment, micro), None
    return (step, Kind.F, segment, micro), (step, Kind.I, segment + 1, micro)
