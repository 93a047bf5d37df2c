"""The well-known schedules as plans.

Each of them starts with some warm-up forwards and then alternates one forward with one backward. They differ in the
number of warm-up forwards, in the order of the segments, and in whether the backward is split.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from culm.errors import ScheduleError
from culm.schedule.action import Action, Kind
from culm.schedule.plan import Plan, check_plan_counts, split_micro_batches

_WorkerOrder: TypeAlias = Callable[[int, range], list[Action]]
"""(stage, micro-batches of the pipeline) -> the action order of one worker, without R and S."""


def generate_plan(name: str, *, pipelines: int, stages: int, micro_batches: int, ranges: int = 2) -> Plan:
    """Generate the plan called `name`. `ranges`, the segments per worker, is used by interleaved only.

    Raises ScheduleError if there is no schedule of that name, it depends on a profile, or a count is not valid.
    """
    if name in PROFILED_SCHEDULES:
        raise ScheduleError(f"the schedule {name!r} depends on the costs of the layers: use culm run, or culm plan")
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(SCHEDULES)}"
        raise ScheduleError(f"there is no schedule {name!r}: {hint}")
    if name == "interleaved":
        return interleaved(pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges)
    return SCHEDULES[name](pipelines=pipelines, stages=stages, micro_batches=micro_batches)


def gpipe(*, pipelines: int, stages: int, micro_batches: int) -> Plan:
    """All forwards, then all backwards: simple, but all activations are alive at once."""

    def order(stage: int, micros: range) -> list[Action]:
        return _actions_of_kind(stage, Kind.F, micros) + _actions_of_kind(stage, Kind.B, micros)

    return _build_plan(
        "gpipe", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches
    ).with_reduce_and_step()


def one_f_one_b(*, pipelines: int, stages: int, micro_batches: int) -> Plan:
    """Stage s runs P - 1 - s warm-up forwards, then one forward and one backward in turn: it keeps P - s alive."""

    def order(stage: int, micros: range) -> list[Action]:
        return _alternate_forward_backward(
            _actions_of_kind(stage, Kind.F, micros), _actions_of_kind(stage, Kind.B, micros), stages - 1 - stage
        )

    return _build_plan(
        "1f1b", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches
    ).with_reduce_and_step()


def zero_bubble(*, pipelines: int, stages: int, micro_batches: int, split_last: int | None = None) -> Plan:
    """ZB-H1: 1F1B with a split backward. Stage s delays its W by s micro-batches, so that I runs sooner.

    This fills two thirds of the bubble of 1F1B, and no worker keeps more activations than the first stage of 1F1B.
    `split_last`: split only so many of each worker's last backwards. The bubble of 1F1B is at the end of a step, so few
    are enough where splitting a backward costs time.
    """

    def order(stage: int, micros: range) -> list[Action]:
        whole = len(micros) - (len(micros) if split_last is None else min(split_last, len(micros)))
        backwards = _actions_of_kind(stage, Kind.B, micros[:whole]) + _actions_of_kind(stage, Kind.I, micros[whole:])
        halves = _alternate_forward_backward(_actions_of_kind(stage, Kind.F, micros), backwards, stages - 1 - stage)
        return _insert_weight_grads(halves, _actions_of_kind(stage, Kind.W, micros[whole:]), delay=stage)

    return _build_plan(
        "zb", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches
    ).with_reduce_and_step()


def interleaved(*, pipelines: int, stages: int, micro_batches: int, ranges: int = 2) -> Plan:
    """Megatron's interleaved 1F1B: a worker holds `ranges` segments, which divides the bubble by that number.

    Micro-batches run in groups of P. If P does not divide their number, groups are up to twice as large: a smaller
    last group can deadlock.
    """
    _check_ranges(ranges)

    def order(stage: int, micros: range) -> list[Action]:
        groups = _micro_batch_groups(micros, stages)
        segments = range(stage, stages * ranges, stages)
        warmup = (ranges - 1) * len(groups[0]) + (stages - 1 - stage) * (2 if ranges > 1 else 1)
        return _alternate_forward_backward(
            _actions_by_group(groups, segments, Kind.F), _actions_by_group(groups, segments[::-1], Kind.B), warmup
        )

    return _build_plan(
        "interleaved", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges
    ).with_reduce_and_step()


def forward_only(*, pipelines: int, stages: int, micro_batches: int, ranges: int = 1) -> Plan:
    """Evaluation: F only, no R and no S. Use the `ranges` of the training plan, so that segments do not move."""
    _check_ranges(ranges)

    def order(stage: int, micros: range) -> list[Action]:
        return _actions_by_group(_micro_batch_groups(micros, stages), range(stage, stages * ranges, stages), Kind.F)

    return _build_plan("forward", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges)


SCHEDULES: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "zb": zero_bubble, "interleaved": interleaved}
)
"""The schedules of `generate_plan`, by name."""

PROFILED_SCHEDULES = ("planned", "auto")
"""Schedules of a run that depend on the costs of its layers: `planned` is made by the planner for these costs (see
`culm.plan.replan.planned_schedule`), `auto` is the fastest of 1f1b, zb and planned."""
RUN_SCHEDULES = (*SCHEDULES, *PROFILED_SCHEDULES)
"""The schedules that a run can use."""


def _build_plan(
    name: str, order: _WorkerOrder, *, pipelines: int, stages: int, micro_batches: int, ranges: int = 1
) -> Plan:
    check_plan_counts(pipelines, stages, micro_batches)
    workers = [
        order(stage, micros) for micros in split_micro_batches(pipelines, micro_batches) for stage in range(stages)
    ]
    return Plan(name, pipelines, stages, stages * ranges, micro_batches, tuple(map(tuple, workers)))


def _check_ranges(ranges: int) -> None:
    if not isinstance(ranges, int) or isinstance(ranges, bool) or ranges < 1:
        raise ScheduleError(f"ranges is {ranges!r}: use a whole number of at least 1")


def _actions_of_kind(segment: int, kind: Kind, micros: range) -> list[Action]:
    return [Action(segment, kind, micro) for micro in micros]


def _alternate_forward_backward(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards (or all, if there are fewer), then one of each in turn, then the remaining backwards."""
    warmup = min(warmup, len(forwards))
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *backwards[len(forwards) - warmup :]]


def _insert_weight_grads(actions: list[Action], weights: list[Action], delay: int) -> list[Action]:
    """Insert a W after every I except the first `delay` ones; the remaining W come at the end."""
    out: list[Action] = []
    rest = iter(weights)
    for action in actions:
        out.append(action)
        if action.kind is Kind.I:
            delay -= 1
            out += [next(rest)] if delay < 0 else []
    return [*out, *rest]


def _micro_batch_groups(micros: range, stages: int) -> list[range]:
    """Groups of at least P micro-batches (or a single group of all), as even as possible, larger groups first."""
    return [
        micros[block.start : block.stop] for block in split_micro_batches(max(1, len(micros) // stages), len(micros))
    ]


def _actions_by_group(groups: list[range], segments: range, kind: Kind) -> list[Action]:
    """Group by group, each through all segments of the worker in order."""
    return [Action(segment, kind, micro) for group in groups for segment in segments for micro in group]
