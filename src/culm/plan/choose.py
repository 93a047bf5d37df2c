"""Choosing the shape: how many pipelines, how many stages, cut where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from culm.errors import PlanError
from culm.plan.partition import Cuts, check_counts, count, fit, fitting, hopeless, misfit, size
from culm.plan.predict import Candidate, Shape, Task, live, predict, work_bound

if TYPE_CHECKING:
    from culm.plan.profile import Profile

BANDWIDTH = 1e9
"""Bytes per second between two nodes, if nobody says better: loopback, or a network of about 10 Gbit/s."""

NEAR = 0.02
"""Predictions this close, as a share, count as equal: then the shape that leaves fewer nodes idle is better."""

ROWS = 16
"""So many shapes are timed even when they can not win, so that the table shows what was turned down."""


@dataclass(frozen=True)
class Choice:
    """The best shape, why it is, and what it was compared with."""

    table: tuple[Candidate, ...]
    """Best first. Shapes that provably can not win are left out once there are enough rows to compare."""
    why: str

    @property
    def best(self) -> Candidate:
        return self.table[0]

    @property
    def pipelines(self) -> int:
        return self.best.pipelines

    @property
    def stages(self) -> int:
        return self.best.stages

    @property
    def cuts(self) -> Cuts:
        return self.best.cuts

    @property
    def step_s(self) -> float:
        return self.best.step_s


def choose(
    profile: Profile,
    *,
    nodes: int,
    micro_batches: int,
    schedule: str,
    memory: int | None = None,
    pipelines: int | None = None,
    stages: int | None = None,
    ranges: int = 2,
    bandwidth: float = BANDWIDTH,
) -> Choice:
    """The shape with the fastest predicted step on at most `nodes` nodes, within `memory` bytes on each.

    `micro_batches` is M, over all pipelines. `pipelines` and `stages` fix what is not to be chosen. `ranges`, the
    segments of a worker, is read by interleaved alone. A send or reduce takes its bytes over `bandwidth`, in bytes per
    second.

    Raises PlanError when no shape fits; the message names the nearest that does.
    """
    task = Task(
        layers=profile.layers,
        nodes=nodes,
        micro_batches=micro_batches,
        schedule=schedule,
        ranges=ranges if schedule == "interleaved" else 1,
        memory=memory,
        bandwidth=bandwidth,
    )
    _check(task, pipelines, stages)
    found = _time_all(task, _shapes(task, pipelines, stages))
    if not found:
        raise PlanError(_nothing_fits(task, pipelines, stages))
    table = _ranked(found)
    return Choice(table, _why(table, nodes))


def _shapes(task: Task, pipelines: int | None, stages: int | None) -> list[Shape]:
    """Every D x P that the nodes, the layers and the micro-batches allow."""
    deepest = min(task.nodes, len(task.layers) // task.ranges)
    return [
        Shape(D, P)
        for P in ([stages] if stages else range(1, deepest + 1))
        for D in ([pipelines] if pipelines else range(1, task.micro_batches + 1))
        if task.nodes >= D * P
    ]


def _time_all(task: Task, shapes: list[Shape]) -> list[Candidate]:
    """The candidates, most promising first, as long as there can be a better one or the table is short."""
    bound = {shape: work_bound(task, shape) for shape in shapes}
    possible = {P for P in {shape.stages for shape in shapes} if _fits_at_best(task, P)}
    found: list[Candidate] = []
    for shape in sorted(shapes, key=bound.__getitem__):
        enough = (1 + NEAR) * min(c.step_s for c in found) if len(found) >= ROWS else math.inf
        if bound[shape] > enough:
            break
        candidate = predict(task, shape, enough) if shape.stages in possible else None
        found += [candidate] if candidate else []
    return found


def _fits_at_best(task: Task, stages: int) -> bool:
    """Whether so many stages fit if each keeps one micro-batch: if not, no plan has to be made to see it."""
    return fit(task.layers, stages, memory=task.memory, in_flight=lambda *_: 1, ranges=task.ranges) is not None


def _ranked(found: list[Candidate]) -> tuple[Candidate, ...]:
    """The winner, then the others by time. Of those as good as the fastest, the one with the fewest idle nodes wins."""
    fastest = min(c.step_s for c in found)
    near = [c for c in found if c.step_s <= (1 + NEAR) * fastest]
    winner = min(near, key=lambda c: (c.idle, c.step_s, c.stages))
    return (winner, *sorted((c for c in found if c is not winner), key=lambda c: (c.step_s, c.idle, c.stages)))


def _why(table: tuple[Candidate, ...], nodes: int) -> str:
    best = table[0]
    shape = f"{count(best.pipelines, 'pipeline')} x {count(best.stages, 'stage')}"
    idle = f", {best.idle} of {nodes} nodes idle" if best.idle else ""
    return (
        f"{shape}: {best.step_s:.3g} s a step, {_compared(table)}; "
        f"bubble {best.bubble:.0%}, {size(best.memory)} in the fullest stage{idle}"
    )


def _compared(table: tuple[Candidate, ...]) -> str:
    if len(table) == 1:
        return "the only shape that fits"
    best, next_best = table[:2]
    other = f"{next_best.pipelines} x {next_best.stages}"
    gain = next_best.step_s / best.step_s - 1 if best.step_s else 0.0
    if gain < 0:
        return f"within {NEAR:.0%} of {other}, which leaves more nodes idle"
    return f"{gain:.0%} faster than {other}" if gain >= 0.005 else f"as fast as {other}"


def _check(task: Task, pipelines: int | None, stages: int | None) -> None:
    given = {"nodes": task.nodes, "micro_batches": task.micro_batches, "pipelines": pipelines, "stages": stages}
    for field, value in given.items():
        if value is not None and value < 1:
            raise PlanError(f"{field} is {value}: use a whole number of at least 1")
    if not task.bandwidth > 0:
        raise PlanError(f"bandwidth is {task.bandwidth}: use a number of bytes per second above 0")
    check_counts(len(task.layers), stages or 1, task.ranges)
    if pipelines and pipelines > task.micro_batches:
        raise PlanError(
            f"pipelines is {pipelines}, but a step has only {count(task.micro_batches, 'micro-batch')}: "
            f"use --pipelines {task.micro_batches}, or a larger global batch"
        )
    needed = (pipelines or 1) * (stages or 1)
    if needed > task.nodes:
        shape = " x ".join(count(n, noun) for n, noun in ((pipelines, "pipeline"), (stages, "stage")) if n)
        raise PlanError(f"nodes is {task.nodes}, but {shape} take {needed}: use --nodes {needed}")


def _nothing_fits(task: Task, pipelines: int | None, stages: int | None) -> str:
    """Only memory can be the reason by now: say how deep a pipeline would have to be."""
    assert task.memory is not None, "without a limit every shape fits"
    memory, layers, D = task.memory, task.layers, pipelines or 1

    @cache
    def peaks(segments: int) -> tuple[int, ...]:
        return live(task.plan(Shape(D, segments // task.ranges)))

    def in_flight(segment: int, segments: int) -> int:
        return peaks(segments)[segment]

    if stages:
        return misfit(layers, stages, memory=memory, in_flight=in_flight, ranges=task.ranges)
    deeper = range(task.nodes // D + 1, len(layers) // task.ranges + 1)
    deep = fitting(layers, deeper, memory=memory, in_flight=in_flight, ranges=task.ranges)
    if not deep:
        return hopeless(layers, memory)
    would = f"{count(D, 'pipeline')} of {count(deep[0], 'stage')} would fit"
    few = f"any shape on {count(task.nodes, 'node')}"
    return f"memory is {size(memory)}, too little for {few}: {would}; use --nodes {D * deep[0]}"
