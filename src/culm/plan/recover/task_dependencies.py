"""Dependencies between the tasks that are still to be run: the edges of the step's graph. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from culm.schedule import Action, Kind

_TensorName: TypeAlias = tuple[int, Kind, int, int | None]
"""(step, kind, segment, micro-batch): the name of an action's output."""


class StepTask(NamedTuple):
    """An action of a step in the task list of a worker."""

    step: int
    action: Action
    output_only: bool = False
    """Only its output is needed."""


class TaskDependency(NamedTuple):
    """`target` waits for `source`, both as indices into the tasks."""

    source: int
    target: int
    boundary: int | None
    """The segment boundary between them; None: both belong to one work item."""


def task_dependencies(tasks: Sequence[StepTask]) -> Iterator[TaskDependency]:
    """The dependencies within `tasks`. Inputs that no task produces are available already."""
    producers = {_produced_tensor(task): number for number, task in enumerate(tasks)}
    for number, task in enumerate(tasks):
        own, other = _consumed_tensors(task)
        source = producers.get(own) if own is not None else None
        if source is not None and tasks[source].output_only == task.output_only:  # otherwise it left no tape
            yield TaskDependency(source, number, None)
        source = producers.get(other) if other is not None else None
        if source is not None and other is not None:
            yield TaskDependency(source, number, min(other[2], task.action.segment))


def _produced_tensor(task: StepTask) -> _TensorName:
    """The gradient is named I, whether I or B computes it."""
    segment, kind, micro = task.action
    return task.step, Kind.I if kind is Kind.B else kind, segment, micro


def _consumed_tensors(task: StepTask) -> tuple[_TensorName | None, _TensorName | None]:
    """The inputs of a task from its own segment and from another segment."""
    step, (segment, kind, micro), _ = task
    if kind is Kind.F:
        return None, (step, Kind.F, segment - 1, micro)
    if kind is Kind.W:
        return (step, Kind.I, segment, micro), None
    return (step, Kind.F, segment, micro), (step, Kind.I, segment + 1, micro)
