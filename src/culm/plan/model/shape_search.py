"""Shape search: how many pipelines, how many stages, and where to cut the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from culm.errors import PlanError
from culm.plan.model.layer_partition import (
    Cuts,
    check_stage_counts,
    explain_misfit,
    explain_never_fits,
    feasible_depths,
    find_cuts,
)
from culm.plan.model.shape_prediction import (
    PipelineGrid,
    ShapeCandidate,
    ShapeSearchProblem,
    peak_in_flight,
    predict_step,
    work_lower_bound,
)
from culm.text_format import count_noun, format_bytes

if TYPE_CHECKING:
    from culm.plan.model.model_profile import Profile

DEFAULT_BANDWIDTH = 1e9
"""Default bytes per second between two nodes: loopback, or a network of about 10 Gbit/s."""

TIE_TOLERANCE = 0.02
"""Predictions within this share count as equal: then the shape that leaves fewer nodes idle is better."""

MIN_TABLE_ROWS = 16
"""At least this many shapes are timed even if they cannot win, so that the table shows what was rejected."""


@dataclass(frozen=True)
class ShapeChoice:
    """The best shape, the reason, and the shapes it was compared with."""

    table: tuple[ShapeCandidate, ...]
    """Best first. Shapes that provably cannot win are omitted once there are enough rows to compare."""
    why: str

    @property
    def best(self) -> ShapeCandidate:
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


def choose_shape(
    profile: Profile,
    *,
    nodes: int,
    micro_batches: int,
    schedule: str,
    memory: int | None = None,
    pipelines: int | None = None,
    stages: int | None = None,
    ranges: int = 2,
    bandwidth: float = DEFAULT_BANDWIDTH,
) -> ShapeChoice:
    """Find the shape with the fastest predicted step on at most `nodes` nodes, within `memory` bytes on each.

    `micro_batches` is M, over all pipelines. `pipelines` and `stages` fix a dimension instead of searching it.
    `ranges`, the segments per worker, is used by interleaved only. A send or reduce takes its bytes divided by
    `bandwidth`, in bytes per second.

    Raises PlanError if no shape fits; the message names the nearest setting that does.
    """
    problem = ShapeSearchProblem(
        layers=profile.layers,
        nodes=nodes,
        micro_batches=micro_batches,
        schedule=schedule,
        ranges=ranges if schedule == "interleaved" else 1,
        memory=memory,
        bandwidth=bandwidth,
    )
    _check_problem(problem, pipelines, stages)
    candidates = _time_candidates(problem, _possible_grids(problem, pipelines, stages))
    if not candidates:
        raise PlanError(_explain_no_shape_fits(problem, pipelines, stages))
    table = _rank_candidates(candidates)
    return ShapeChoice(table, _explain_choice(table, nodes))


def shared_cores_step_s(
    profile: Profile, *, pipelines: int, stages: int, threads: int, micro_batches: int, cores: int
) -> float | None:
    """The least time of a step whose workers are on one machine and share its cores: all work divided by the cores.
    None if every thread has a core of its own."""
    if pipelines * stages * threads <= cores:
        return None
    work = sum(layer.time_s * micro_batches + layer.step_s * pipelines for layer in profile.layers)
    return work * threads / cores


def _possible_grids(problem: ShapeSearchProblem, pipelines: int | None, stages: int | None) -> list[PipelineGrid]:
    """Every D x P that the nodes, the layers and the micro-batches allow."""
    deepest = min(problem.nodes, len(problem.layers) // problem.ranges)
    return [
        PipelineGrid(D, P)
        for P in ([stages] if stages else range(1, deepest + 1))
        for D in ([pipelines] if pipelines else range(1, problem.micro_batches + 1))
        if problem.nodes >= D * P
    ]


def _time_candidates(problem: ShapeSearchProblem, shapes: list[PipelineGrid]) -> list[ShapeCandidate]:
    """Time the shapes in the order of their lower bounds, until no better one can exist and the table is full."""
    bound = {shape: work_lower_bound(problem, shape) for shape in shapes}
    possible = {P for P in {shape.stages for shape in shapes} if _fits_with_one_in_flight(problem, P)}
    candidates: list[ShapeCandidate] = []
    for shape in sorted(shapes, key=bound.__getitem__):
        cutoff_s = (
            (1 + TIE_TOLERANCE) * min(c.step_s for c in candidates) if len(candidates) >= MIN_TABLE_ROWS else math.inf
        )
        if bound[shape] > cutoff_s:
            break
        candidate = predict_step(problem, shape, cutoff_s) if shape.stages in possible else None
        candidates += [candidate] if candidate else []
    return candidates


def _fits_with_one_in_flight(problem: ShapeSearchProblem, stages: int) -> bool:
    """Whether this many stages fit with one micro-batch in flight. If not, no plan has to be generated to see it."""
    return (
        find_cuts(problem.layers, stages, memory=problem.memory, in_flight=lambda *_: 1, ranges=problem.ranges)
        is not None
    )


def _rank_candidates(candidates: list[ShapeCandidate]) -> tuple[ShapeCandidate, ...]:
    """The winner, then the others by time. Among shapes as good as the fastest, the fewest idle nodes win."""
    fastest = min(c.step_s for c in candidates)
    near = [c for c in candidates if c.step_s <= (1 + TIE_TOLERANCE) * fastest]
    winner = min(near, key=lambda c: (c.idle_nodes, c.step_s, c.stages))
    return (
        winner,
        *sorted((c for c in candidates if c is not winner), key=lambda c: (c.step_s, c.idle_nodes, c.stages)),
    )


def _explain_choice(table: tuple[ShapeCandidate, ...], nodes: int) -> str:
    best = table[0]
    shape = f"{count_noun(best.pipelines, 'pipeline')} x {count_noun(best.stages, 'stage')}"
    idle = f", {best.idle_nodes} of {nodes} nodes idle" if best.idle_nodes else ""
    return (
        f"{shape}: {best.step_s:.3g} s a step, {_compare_with_next(table)}; "
        f"bubble {best.bubble_fraction:.0%}, {format_bytes(best.max_stage_bytes)} in the fullest stage{idle}"
    )


def _compare_with_next(table: tuple[ShapeCandidate, ...]) -> str:
    if len(table) == 1:
        return "the only shape that fits"
    best, next_best = table[:2]
    other = f"{next_best.pipelines} x {next_best.stages}"
    gain = next_best.step_s / best.step_s - 1 if best.step_s else 0.0
    if gain < 0:
        return f"within {TIE_TOLERANCE:.0%} of {other}, which leaves more nodes idle"
    return f"{gain:.0%} faster than {other}" if gain >= 0.005 else f"as fast as {other}"


def _check_problem(problem: ShapeSearchProblem, pipelines: int | None, stages: int | None) -> None:
    counts = {"nodes": problem.nodes, "micro_batches": problem.micro_batches, "pipelines": pipelines, "stages": stages}
    for field, value in counts.items():
        if value is not None and value < 1:
            raise PlanError(f"{field} is {value}: use a whole number of at least 1")
    if not problem.bandwidth > 0:
        raise PlanError(f"bandwidth is {problem.bandwidth}: use a number of bytes per second above 0")
    check_stage_counts(len(problem.layers), stages or 1, problem.ranges)
    if pipelines and pipelines > problem.micro_batches:
        raise PlanError(
            f"pipelines is {pipelines}, but a step has only {count_noun(problem.micro_batches, 'micro-batch')}: "
            f"use --pipelines {problem.micro_batches}, or a larger global batch"
        )
    needed = (pipelines or 1) * (stages or 1)
    if needed > problem.nodes:
        shape = " x ".join(count_noun(n, noun) for n, noun in ((pipelines, "pipeline"), (stages, "stage")) if n)
        raise PlanError(f"nodes is {problem.nodes}, but {shape} take {needed}: use --nodes {needed}")


def _explain_no_shape_fits(problem: ShapeSearchProblem, pipelines: int | None, stages: int | None) -> str:
    """The error sentence. Only memory can be the reason here: say how many stages a pipeline would need."""
    assert problem.memory is not None, "without a limit every shape fits"
    memory, layers, D = problem.memory, problem.layers, pipelines or 1

    @cache
    def peaks(segments: int) -> tuple[int, ...]:
        return peak_in_flight(problem.plan_one_pipeline(PipelineGrid(D, segments // problem.ranges)))

    def in_flight(segment: int, segments: int) -> int:
        return peaks(segments)[segment]

    if stages:
        return explain_misfit(layers, stages, memory=memory, in_flight=in_flight, ranges=problem.ranges)
    deeper = range(problem.nodes // D + 1, len(layers) // problem.ranges + 1)
    deep = feasible_depths(layers, deeper, memory=memory, in_flight=in_flight, ranges=problem.ranges)
    if not deep:
        return explain_never_fits(layers, memory)
    deeper_fits = f"{count_noun(D, 'pipeline')} of {count_noun(deep[0], 'stage')} would fit"
    subject = f"any shape on {count_noun(problem.nodes, 'node')}"
    return f"memory is {format_bytes(memory)}, too little for {subject}: {deeper_fits}; use --nodes {D * deep[0]}"
