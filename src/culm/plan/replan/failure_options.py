"""Options after failures: all ways to continue without the failed slots, with their step times, shortest first."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from culm.plan.model.shape_prediction import near_equal_depths
from culm.plan.replan.plan_cache import PlanCache
from culm.plan.replan.plan_case import PlanCase, Slot
from culm.plan.replan.step_bound import step_lower_bound
from culm.plan.replan.symmetry import single_pipeline_case
from culm.schedule import Costs, Kind
from culm.text_format import count_noun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True)
class FailureOption:
    """One way to continue without the failed slots."""

    name: str
    slots: float
    """Time per step."""
    idle: int
    """Live workers without work, available as spares."""
    how: str
    """One sentence: which workers run the lost micro-batches, and what has to be moved first."""
    planned: bool = True
    """True if a plan was computed, False if the time is from a formula."""


def list_failure_options(case: PlanCase, plan_cache: PlanCache | None = None) -> tuple[FailureOption, ...]:
    """All options, shortest step first. Ties keep the order in which options are tried, the one that moves least first:
    re-routing, moved holes, shadows, fewer pipelines, pipelines of unequal depth.

    Split backward and the staggered optimizer are omitted if the case does not allow them.
    """
    cache = plan_cache or PlanCache()
    step_time_of = partial(_planned_step_time, cache)
    options: list[FailureOption | None] = [
        *_reroute_options(case, step_time_of),
        _move_option(case, cache),
        _shadow_option(case, step_time_of),
        _fewer_pipelines_option(case, step_time_of),
        _uneven_option(case),
    ]
    return tuple(sorted(filter(None, options), key=lambda option: round(option.slots, 9)))


def summarize_options(options: Sequence[FailureOption]) -> str:
    """One sentence: which option wins and by how much, and what a new partition would gain, if that is more."""
    first, *others = [option for option in options if option.planned]
    text = f"{first.name}: {first.slots:.6g} a step"
    if others:
        more = others[0].slots / first.slots - 1 if first.slots else 0.0
        text += f"; {others[0].name} takes {more:.1%} more" if more >= 0.0005 else f", as short as {others[0].name}"
    cut = options[0]
    if not cut.planned:
        less = 1 - cut.slots / first.slots
        text += (
            f"; {cut.name} would take {less:.1%} less, if the model can be cut that way, after all layers have moved"
        )
    return text


def _planned_step_time(plan_cache: PlanCache, case: PlanCase) -> float:
    return plan_cache.plan_for(case).step_time


def _reroute_options(case: PlanCase, step_time_of: Callable[[PlanCase], float]) -> list[FailureOption]:
    """Peers run the lost micro-batches, with each combination of split and stagger that the case allows."""
    variants = [("re-route", False, False)]
    variants += [("re-route, split", True, False)] if case.split else []
    variants += [("re-route, stagger", False, True)] if case.stagger and not case.split else []
    variants += [("re-route, split, stagger", True, True)] if case.split and case.stagger else []
    how = "live peers of the stage run the lost micro-batches; nothing is moved"
    return [
        FailureOption(name, step_time_of(replace(case, split=split, stagger=stagger)), 0, how)
        for name, split, stagger in variants[::-1]
    ]


def _move_option(case: PlanCase, plan_cache: PlanCache) -> FailureOption | None:
    solution, normal = plan_cache.plan_after_moves(case)
    if not normal.moves:
        return None
    moves = ", ".join(f"{source} to {target}" for source, target in normal.moves)
    many = f"{count_noun(len(normal.moves), 'worker')} to another stage first: {moves}"
    return FailureOption("re-route after moves", solution.step_time, 0, many)


def _shadow_option(case: PlanCase, step_time_of: Callable[[PlanCase], float]) -> FailureOption | None:
    """The predecessor of a failed slot holds its layers and runs both stages as one.

    Only possible if no two adjacent slots failed: a shadow holds one stage in addition to its own. Every worker keeps a
    shadow, so every worker also runs the optimizer step of its successor's layers.
    """
    if case.stages == 1 or any(_predecessor(slot, case.stages) in case.failed for slot in case.failed):
        return None
    costs = _costs_with_shadows(case)
    whole = (
        [step_time_of(replace(single_pipeline_case(case), costs=costs))]
        if len(_damaged_pipelines(case)) < case.pipelines
        else []
    )
    damaged = [step_time_of(_pipeline_with_shadows(case, costs, pipeline)) for pipeline in _damaged_pipelines(case)]
    how = "the predecessor, which holds a copy, runs both stages; every worker also updates its copy"
    wraps = any(slot.stage == 0 for slot in case.failed)
    return FailureOption("shadow", max(whole + damaged), 0, how, planned=not wraps)


def _predecessor(slot: Slot, stages: int) -> Slot:
    return Slot(slot.pipeline, (slot.stage - 1) % stages)


def _damaged_pipelines(case: PlanCase) -> list[int]:
    return sorted({slot.pipeline for slot in case.failed})


def _costs_with_shadows(case: PlanCase) -> Costs:
    """S of the worker's own stage plus S of the next stage."""
    step = case.action_costs[Kind.S]
    return replace(case.costs, step=tuple(step[s] + step[(s + 1) % case.stages] for s in range(case.stages)))


def _pipeline_with_shadows(case: PlanCase, costs: Costs, pipeline: int) -> PlanCase:
    """The pipeline as it runs with its shadows: each lost stage is merged into the previous one."""
    lost = {slot.stage for slot in case.failed if slot.pipeline == pipeline}
    groups = _stages_by_worker(case.stages, lost)
    single = replace(single_pipeline_case(case), costs=costs)
    price = single.action_costs

    def each(kind: Kind) -> tuple[float, ...]:
        return tuple(sum(price[kind][s] for s in group) for group in groups)

    merged = Costs(
        forward=each(Kind.F),
        input=each(Kind.I),
        weight=each(Kind.W),
        reduce=each(Kind.R),
        step=each(Kind.S),
        send=tuple(
            single.send_costs[group[-1]] if group[-1] < case.stages - 1 else max(single.send_costs)
            for group in groups[:-1]
        ),
    )
    return replace(single, stages=len(groups), costs=merged)


def _stages_by_worker(stages: int, lost_stages: Iterable[int]) -> list[list[int]]:
    """Stages grouped by the worker that runs them. The predecessor of the first stage is the last one: that group is
    placed at the front, where it delays the pipeline most."""
    lost = set(lost_stages)
    groups: list[list[int]] = []
    for stage in range(stages):
        if stage in lost and groups:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return [groups[-1] + groups[0], *groups[1:-1]] if 0 in lost and len(groups) > 1 else groups


def _fewer_pipelines_option(case: PlanCase, step_time_of: Callable[[PlanCase], float]) -> FailureOption | None:
    """Drop the damaged pipelines; their healthy workers become spares."""
    damaged = _damaged_pipelines(case)
    left = case.pipelines - len(damaged)
    if not left or not damaged:
        return None
    spares = len(damaged) * case.stages - len(case.failed)
    slots = step_time_of(replace(case, pipelines=left, failed=frozenset()))
    how = f"the batch on {count_noun(left, 'whole pipeline')}, and {count_noun(spares, 'healthy worker')} standing by"
    return FailureOption("fewer pipelines", slots, spares, how)


def _uneven_option(case: PlanCase) -> FailureOption | None:
    """All live workers in as many pipelines or one fewer, with depths that differ by at most one, as in Oobleck.

    Assumes that the model can be cut evenly at any depth, and that the batch is divided so that all pipelines end
    together. Stages of different pipelines hold different layers, so the optimizer cannot be staggered.
    """
    nodes = case.pipelines * case.stages - len(case.failed)
    if not case.failed:
        return None
    tried = [near_equal_depths(nodes, d) for d in (case.pipelines - 1, case.pipelines) if 1 <= d <= nodes]
    slots, depths = min((_time_sharing_batch(case, depths), depths) for depths in tried)
    layout = " + ".join(f"{many} x {depth}" for depth, many in sorted(Counter(depths).items(), reverse=True))
    return FailureOption(
        "uneven pipelines", slots, 0, f"{layout} stages, cut evenly; nearly all layers move", planned=False
    )


def _time_sharing_batch(case: PlanCase, depths: Sequence[int]) -> float:
    """The least time in which pipelines of these depths, working in parallel, finish the whole batch."""
    alone = {depth: _pipeline_times(case, depth) for depth in set(depths)}

    def done(within: float) -> int:
        times = [alone[depth] for depth in depths]
        return sum(max(0, math.floor((within - first) / each + 1e-9) + 1) for first, each in times)

    low, high = 0.0, max(first + case.micro_batches * each for first, each in alone.values())
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) >= case.micro_batches else (middle, high)
    return high


_MIN_TIME = 1e-12
"""Used in place of zero where a time is a divisor."""


def _pipeline_times(case: PlanCase, depth: int) -> tuple[float, float]:
    """Time of the first and of each further micro-batch in a pipeline of that depth with evenly divided work, derived
    from the step bound for many micro-batches."""
    price = case.action_costs

    def share(kind: Kind) -> float:
        return sum(price[kind]) / depth

    costs = Costs(
        forward=share(Kind.F),
        input=share(Kind.I),
        weight=share(Kind.W),
        reduce=max(price[Kind.R]),
        step=share(Kind.S),
        send=max(case.send_costs, default=0.0),
    )
    many = 2 * depth + 2
    shape = replace(case, pipelines=1, stages=depth, micro_batches=many, costs=costs, failed=frozenset(), stagger=False)
    bound, each = step_lower_bound(shape), share(Kind.F) + share(Kind.I) + share(Kind.W)
    return bound - (many - 1) * each, max(each, _MIN_TIME)
