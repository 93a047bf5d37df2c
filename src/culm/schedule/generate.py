"""The well-known schedules, as plans.

Each of them runs some forwards first and then alternates one forward with one backward. They differ in how many come
first, in the order of the segments, and in whether backward is split.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from culm.errors import ScheduleError
from culm.schedule.action import Action, Kind
from culm.schedule.plan import Plan, blocks, check_shape

_Order: TypeAlias = Callable[[int, range], list[Action]]
"""(stage, micro-batches of the pipeline) -> the order of one worker, without R and S."""


def generate(name: str, *, pipelines: int, stages: int, micro_batches: int, ranges: int = 2) -> Plan:
    """The plan of that name. `ranges`, the segments per worker, is read by interleaved alone."""
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(SCHEDULES)}"
        raise ScheduleError(f"there is no schedule {name!r}: {hint}")
    if name == "interleaved":
        return interleaved(pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges)
    return SCHEDULES[name](pipelines=pipelines, stages=stages, micro_batches=micro_batches)


def gpipe(*, pipelines: int, stages: int, micro_batches: int) -> Plan:
    """All forwards, then all backwards: simple, and every activation is alive at once."""

    def order(stage: int, micros: range) -> list[Action]:
        return _each(stage, Kind.F, micros) + _each(stage, Kind.B, micros)

    return _plan("gpipe", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches).with_updates()


def one_f_one_b(*, pipelines: int, stages: int, micro_batches: int) -> Plan:
    """As many forwards first as there are stages behind, then one forward, one backward: stage s keeps P - s alive."""

    def order(stage: int, micros: range) -> list[Action]:
        return _alternate(_each(stage, Kind.F, micros), _each(stage, Kind.B, micros), stages - 1 - stage)

    return _plan("1f1b", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches).with_updates()


def zero_bubble(*, pipelines: int, stages: int, micro_batches: int) -> Plan:
    """ZB-H1: 1F1B with backward split. Stage s runs its W s micro-batches late, so that I gets through sooner.

    That fills two thirds of the bubble of 1F1B, and no worker keeps more alive than the first stage of 1F1B does.
    """

    def order(stage: int, micros: range) -> list[Action]:
        halves = _alternate(_each(stage, Kind.F, micros), _each(stage, Kind.I, micros), stages - 1 - stage)
        return _follow(halves, _each(stage, Kind.W, micros), late=stage)

    return _plan("zb", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches).with_updates()


def interleaved(*, pipelines: int, stages: int, micro_batches: int, ranges: int = 2) -> Plan:
    """Megatron's interleaved 1F1B: a worker holds `ranges` segments, which cuts the bubble by as much.

    Micro-batches go round in groups of P. Where P does not divide their number, groups are up to twice as large: a
    smaller last group, as one would cut by hand, can deadlock.
    """
    _check_ranges(ranges)

    def order(stage: int, micros: range) -> list[Action]:
        groups = _groups(micros, stages)
        held = range(stage, stages * ranges, stages)
        first = (ranges - 1) * len(groups[0]) + (stages - 1 - stage) * (2 if ranges > 1 else 1)
        return _alternate(_rounds(groups, held, Kind.F), _rounds(groups, held[::-1], Kind.B), first)

    return _plan(
        "interleaved", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges
    ).with_updates()


def forward_only(*, pipelines: int, stages: int, micro_batches: int, ranges: int = 1) -> Plan:
    """Evaluation: F alone, no R and no S. `ranges` as in the training plan, so that segments stay where they are."""
    _check_ranges(ranges)

    def order(stage: int, micros: range) -> list[Action]:
        return _rounds(_groups(micros, stages), range(stage, stages * ranges, stages), Kind.F)

    return _plan("forward", order, pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges)


SCHEDULES: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "zb": zero_bubble, "interleaved": interleaved}
)
"""What `generate` knows, by name."""


def _plan(name: str, order: _Order, *, pipelines: int, stages: int, micro_batches: int, ranges: int = 1) -> Plan:
    check_shape(pipelines, stages, micro_batches)
    workers = [order(stage, micros) for micros in blocks(pipelines, micro_batches) for stage in range(stages)]
    return Plan(name, pipelines, stages, stages * ranges, micro_batches, tuple(map(tuple, workers)))


def _check_ranges(ranges: int) -> None:
    if not isinstance(ranges, int) or isinstance(ranges, bool) or ranges < 1:
        raise ScheduleError(f"ranges is {ranges!r}: use a whole number of at least 1")


def _each(segment: int, kind: Kind, micros: range) -> list[Action]:
    return [Action(segment, kind, micro) for micro in micros]


def _alternate(forwards: list[Action], backwards: list[Action], first: int) -> list[Action]:
    """`first` forwards (or all, if there are fewer), then one of each in turn, then the backwards that are left."""
    first = min(first, len(forwards))
    pairs = zip(forwards[first:], backwards, strict=False)
    return [*forwards[:first], *(action for pair in pairs for action in pair), *backwards[len(forwards) - first :]]


def _follow(halves: list[Action], weights: list[Action], late: int) -> list[Action]:
    """A W after every I but the first `late` ones; the W that are left come at the end."""
    out: list[Action] = []
    rest = iter(weights)
    for action in halves:
        out.append(action)
        if action.kind is Kind.I:
            late -= 1
            out += [next(rest)] if late < 0 else []
    return [*out, *rest]


def _groups(micros: range, stages: int) -> list[range]:
    """Groups of at least P micro-batches (or one of all), as even as possible and never growing."""
    return [micros[block.start : block.stop] for block in blocks(max(1, len(micros) // stages), len(micros))]


def _rounds(groups: list[range], segments: range, kind: Kind) -> list[Action]:
    """Group by group, each through all segments of the worker in turn."""
    return [Action(segment, kind, micro) for group in groups for segment in segments for micro in group]
