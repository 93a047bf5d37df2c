"""What can be done about failed slots: every way that culm knows, timed, the shortest step first."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from culm.plan.ahead import Plans
from culm.plan.bound import bound
from culm.plan.failures import Case, Slot
from culm.plan.partition import count
from culm.schedule import Costs, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(frozen=True)
class Remedy:
    """One way to go on without the failed slots."""

    name: str
    slots: float
    """Time per step."""
    idle: int
    """Live workers without work: warm spares."""
    how: str
    """In words: who runs what was lost, and what has to be moved first."""
    planned: bool = True
    """Whether there is a plan behind it, or a formula."""


def remedies(case: Case, plans: Plans | None = None) -> tuple[Remedy, ...]:
    """All ways, best first. Of equal steps that with less to move comes first, which is the order in which they are
    tried: re-routing, holes moved, shadows, fewer pipelines, pipelines of unequal depth.

    Split backward and the staggered optimizer are left out where the case rules them out.
    """
    made = plans or Plans()
    best = partial(_step, made)
    found: list[Remedy | None] = [
        *_rerouted(case, best),
        _moved(case, made),
        _shadowed(case, best),
        _fewer(case, best),
        _uneven(case),
    ]
    return tuple(sorted(filter(None, found), key=lambda remedy: round(remedy.slots, 9)))


def compared(ranked: Sequence[Remedy]) -> str:
    """Which one wins, and by how much, in a sentence; and what a new cut would gain, where that is more."""
    first, *others = [remedy for remedy in ranked if remedy.planned]
    told = f"{first.name}: {first.slots:.6g} a step"
    if others:
        more = others[0].slots / first.slots - 1 if first.slots else 0.0
        told += f"; {others[0].name} takes {more:.1%} more" if more >= 0.0005 else f", as short as {others[0].name}"
    cut = ranked[0]
    if not cut.planned:
        less = 1 - cut.slots / first.slots
        told += f"; {cut.name} would take {less:.1%} less, if the model can be cut so, once all layers have moved"
    return told


def _step(plans: Plans, case: Case) -> float:
    return plans.best(case).slots


def _rerouted(case: Case, best: Callable[[Case], float]) -> list[Remedy]:
    """Peers run the lost micro-batches; with each means that the case allows."""
    means = [("re-route", False, False)]
    means += [("re-route, split", True, False)] if case.split else []
    means += [("re-route, stagger", False, True)] if case.stagger and not case.split else []
    means += [("re-route, split, stagger", True, True)] if case.split and case.stagger else []
    how = "live peers of the stage run the lost micro-batches; nothing is moved"
    return [
        Remedy(name, best(replace(case, split=split, stagger=stagger)), 0, how) for name, split, stagger in means[::-1]
    ]


def _moved(case: Case, plans: Plans) -> Remedy | None:
    found, normal = plans.normal(case)
    if not normal.moves:
        return None
    told = ", ".join(f"{source} to {target}" for source, target in normal.moves)
    many = f"{count(len(normal.moves), 'worker')} to another stage first: {told}"
    return Remedy("re-route after moves", found.slots, 0, many)


def _shadowed(case: Case, best: Callable[[Case], float]) -> Remedy | None:
    """The predecessor of a failed slot has its layers and runs both stages as one.

    Only for one failure in a row: a shadow holds one stage besides its own. Everybody keeps a shadow, so every worker
    steps the layers of its successor too.
    """
    if case.stages == 1 or any(_before(slot, case.stages) in case.failed for slot in case.failed):
        return None
    costs = _with_shadows(case)
    whole = [best(replace(_one(case), costs=costs))] if len(_hurt(case)) < case.pipelines else []
    hurt = [best(_doubled(case, costs, pipeline)) for pipeline in _hurt(case)]
    how = "the predecessor, which keeps a copy, runs both stages; every worker steps a copy too"
    wraps = any(slot.stage == 0 for slot in case.failed)
    return Remedy("shadow", max(whole + hurt), 0, how, planned=not wraps)


def _before(slot: Slot, stages: int) -> Slot:
    return Slot(slot.pipeline, (slot.stage - 1) % stages)


def _hurt(case: Case) -> list[int]:
    return sorted({slot.pipeline for slot in case.failed})


def _one(case: Case) -> Case:
    return replace(case, pipelines=1, micro_batches=len(case.blocks[0]), failed=frozenset())


def _with_shadows(case: Case) -> Costs:
    """S of its own stage and of the next one."""
    step = case.prices[Kind.S]
    return replace(case.costs, step=tuple(step[s] + step[(s + 1) % case.stages] for s in range(case.stages)))


def _doubled(case: Case, costs: Costs, pipeline: int) -> Case:
    """The pipeline as it runs with its shadows: each lost stage merged into the one before it."""
    lost = {slot.stage for slot in case.failed if slot.pipeline == pipeline}
    groups = _groups(case.stages, lost)
    one = replace(_one(case), costs=costs)
    price = one.prices

    def each(kind: Kind) -> tuple[float, ...]:
        return tuple(sum(price[kind][s] for s in group) for group in groups)

    merged = Costs(
        forward=each(Kind.F),
        input=each(Kind.I),
        weight=each(Kind.W),
        reduce=each(Kind.R),
        step=each(Kind.S),
        send=tuple(one.sends[group[-1]] if group[-1] < case.stages - 1 else max(one.sends) for group in groups[:-1]),
    )
    return replace(one, stages=len(groups), costs=merged)


def _groups(stages: int, lost: Iterable[int]) -> list[list[int]]:
    """Stages by the worker that runs them. The predecessor of the first stage is the last one: both are counted at
    the front then, where the work of the two is felt most."""
    gone = set(lost)
    groups: list[list[int]] = []
    for stage in range(stages):
        if stage in gone and groups:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return [groups[-1] + groups[0], *groups[1:-1]] if 0 in gone and len(groups) > 1 else groups


def _fewer(case: Case, best: Callable[[Case], float]) -> Remedy | None:
    """The hurt pipelines are given up; their healthy workers stand by."""
    hurt = _hurt(case)
    left = case.pipelines - len(hurt)
    if not left or not hurt:
        return None
    spares = len(hurt) * case.stages - len(case.failed)
    slots = best(replace(case, pipelines=left, failed=frozenset()))
    how = f"the batch on {count(left, 'whole pipeline')}, and {count(spares, 'healthy worker')} standing by"
    return Remedy("fewer pipelines", slots, spares, how)


def _uneven(case: Case) -> Remedy | None:
    """All live workers in as many pipelines or one fewer, whose depths differ by one at most, as Oobleck has them.

    The model is taken to be cut evenly at any depth, and pipelines share the batch so as to end together. Stages of
    different pipelines do not match, so they can not step on their own clocks.
    """
    nodes = case.pipelines * case.stages - len(case.failed)
    if not case.failed:
        return None
    tried = [_depths(nodes, d) for d in (case.pipelines - 1, case.pipelines) if 1 <= d <= nodes]
    slots, depths = min((_together(case, depths), depths) for depths in tried)
    told = " + ".join(f"{many} x {depth}" for depth, many in sorted(Counter(depths).items(), reverse=True))
    return Remedy("uneven pipelines", slots, 0, f"{told} stages, cut evenly; nearly all layers move", planned=False)


def _depths(nodes: int, pipelines: int) -> tuple[int, ...]:
    return tuple(nodes // pipelines + (i < nodes % pipelines) for i in range(pipelines))


def _together(case: Case, depths: Sequence[int]) -> float:
    """The least time in which pipelines of these depths, each with as much of the batch as it can do, are done."""
    alone = {depth: _alone(case, depth) for depth in set(depths)}

    def done(within: float) -> int:
        times = [alone[depth] for depth in depths]
        return sum(max(0, math.floor((within - first) / each + 1e-9) + 1) for first, each in times)

    low, high = 0.0, max(first + case.micro_batches * each for first, each in alone.values())
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) >= case.micro_batches else (middle, high)
    return high


_LEAST = 1e-12
"""Instead of no time at all, which can not be divided by."""


def _alone(case: Case, depth: int) -> tuple[float, float]:
    """A pipeline of that depth, with the work of all stages spread evenly over it: how long its first micro-batch
    takes and each further one, by the bound of many."""
    price = case.prices

    def share(kind: Kind) -> float:
        return sum(price[kind]) / depth

    costs = Costs(
        forward=share(Kind.F),
        input=share(Kind.I),
        weight=share(Kind.W),
        reduce=max(price[Kind.R]),
        step=share(Kind.S),
        send=max(case.sends, default=0.0),
    )
    many = 2 * depth + 2
    shape = replace(case, pipelines=1, stages=depth, micro_batches=many, costs=costs, failed=frozenset(), stagger=False)
    spent, each = bound(shape), share(Kind.F) + share(Kind.I) + share(Kind.W)
    return spent - (many - 1) * each, max(each, _LEAST)
