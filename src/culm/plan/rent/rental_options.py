"""Find shapes, micro-batch sizes and strategies that fit a memory and a budget, best first, with the reason. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import PlanError
from culm.plan.model.accelerators import ACCELERATORS, USABLE_MEMORY_SHARE
from culm.plan.model.early_grad_send import knows_split_overhead
from culm.plan.model.layer_partition import Cuts, find_cuts, in_flight_1f1b, segment_layer_ranges
from culm.plan.rent.failure_free_step import AUTO, failure_free_step_s, resolve_schedule
from culm.plan.rent.link_costs import NodeLinks, stage_costs, without_first_input_gradient
from culm.plan.rent.memory_model import WorkerMemory, fullest_worker, with_overhead
from culm.plan.rent.strategy_goodput import (
    EstimatedStrategy,
    GoodputInputs,
    PreemptionRisk,
    StrategyGoodput,
    slowest_stage_s,
)
from culm.plan.replan.plan_case import PlanCase
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.replan.step_bound import step_lower_bound
from culm.plan.reshape.run_schedule import ScheduledStep
from culm.plan.reshape.segment_costs import capacities_of_1f1b
from culm.text_format import count_noun, format_bytes

if TYPE_CHECKING:
    from culm.plan.model.model_profile import LayerCost, Profile
    from culm.plan.replan.plan_case import ActivationLimit
    from culm.plan.replan.two_range_schedule import TwoRanges

MAX_PLANNED_SHAPES = 12
"""At most this many shapes are planned and listed; the others are only compared by their lower bound."""

GOODPUT_TOLERANCE = 0.02
"""Goodputs that differ by less than this share count as equal: the cheaper one is better."""


@dataclass(frozen=True, kw_only=True)
class InstanceOffer:
    """A machine to rent, as plain values: prices can come from any source."""

    instance: str
    memory: int
    """Usable bytes of a worker."""
    on_accelerator: bool = True
    """Whether the workers compute on accelerators, which have a memory of their own."""
    bandwidth: float
    """Bytes per second from a worker to other nodes, while all workers of its node send."""
    usd_per_h: float
    """Price of one node."""
    workers: int = 1
    """Workers of a node, one for each accelerator."""
    zones: int = 1
    node_link: float = 0.0
    """Bytes per second from a worker to another one of its node; 0: as to other nodes."""

    @property
    def links(self) -> NodeLinks:
        return NodeLinks(between_nodes=self.bandwidth, within_node=self.node_link, workers=self.workers)


@dataclass(frozen=True, kw_only=True)
class RentalQuery:
    """The request. Raises PlanError, in one sentence, for an invalid value."""

    profiles: Mapping[int, Profile]
    """By micro-batch size, which is part of the choice."""
    global_batch: int
    """Samples per step."""
    node_range: tuple[int, int]
    """Minimum and maximum."""
    budget_usd_per_h: float = math.inf
    """Dollars per hour."""
    strategies: Sequence[EstimatedStrategy]
    """The strategies to choose from; of equals the first is chosen."""
    pipelines: int | None = None
    stages: int | None = None
    risk: PreemptionRisk = field(default_factory=PreemptionRisk)
    schedule: str = PLANNED
    """The schedule while every slot is filled, as in `culm run --schedule`; "auto": the fastest for each shape."""
    max_shapes: int = MAX_PLANNED_SHAPES
    """At most this many shapes are planned."""

    def __post_init__(self) -> None:
        low, high = self.node_range
        if not 1 <= low <= high:
            raise PlanError(f"nodes is {low}..{high}: use whole numbers of at least 1, the smaller one first")
        if not self.budget_usd_per_h > 0:
            raise PlanError(f"budget is {self.budget_usd_per_h}/h: use a number of dollars above 0")
        for name, value in (("batch", self.global_batch), ("pipelines", self.pipelines), ("stages", self.stages)):
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}: use a whole number of at least 1")


@dataclass(frozen=True)
class RentalOption:
    """A shape with its strategy, expected goodput and cost."""

    case: PlanCase
    limits: tuple[int, ...]
    """By stage: the most activations that a run keeps under `planned`."""
    cuts: Cuts
    micro_batch: int
    nodes: int
    strategy: str
    """Name of the strategy."""
    checkpoint_interval_s: float
    zones: int
    schedule: str
    failure_free_step_s: float
    """Seconds of a step with every slot filled, under that schedule."""
    goodput: float
    """Expected samples per second, preemptions included."""
    usd_per_h: float
    """Price with every node present."""
    mean_nodes_present: float
    """Share of the nodes that are present, and paid for, on average."""
    least_stages: int
    """Fewest stages of a pipeline that fit into the memory."""
    memory: WorkerMemory
    """What fills the memory of the fullest worker."""

    @property
    def usd_per_million(self) -> float:
        """Dollars per million samples."""
        return self.usd_per_h * self.mean_nodes_present / 3600 / self.goodput * 1e6 if self.goodput else math.inf

    @property
    def workers(self) -> int:
        """Workers with a slot."""
        return self.case.pipelines * self.case.stages

    @property
    def shape(self) -> str:
        return f"{self.case.pipelines} x {self.case.stages}"


class RentalOptions(NamedTuple):
    """The options, best first, and the reason for the order."""

    table: tuple[RentalOption, ...]
    why: str


def find_rental_options(
    query: RentalQuery, offer: InstanceOffer, *, explain: bool = True, only_best: bool = False
) -> RentalOptions:
    """Every shape that fits the memory, the nodes and the budget, with the strategy of the highest expected goodput.

    The highest goodput is best; among options within 2 % of it, the cheapest. If no shape fits, raises PlanError that
    names the nearest one that would; without `explain` it does not look for that. With `only_best`, shapes whose bound
    shows that they are slower than one before are left out of the table.
    """
    found = [drafted for drafted in _fitting_shapes(query, offer) if drafted.usd_per_h(offer) <= query.budget_usd_per_h]
    if not found:
        raise PlanError(_explain_nothing_fits(query, offer) if explain else "nothing fits")
    rows: list[RentalOption] = []
    for drafted in _most_promising(found, query.max_shapes):
        if only_best and rows and _is_slower(drafted, query, max(row.goodput for row in rows)):
            continue
        if (row := _make_option(drafted, query, offer)) is not None:
            rows.append(row)
    if not rows:
        names = ", ".join(strategy.name for strategy in query.strategies)
        raise PlanError(
            f"--strategy {names} gives no estimate for the shapes that fit on {offer.instance}: leave it out to "
            "compare the others, or define Strategy.estimate if it is your own"
        )
    ranked = _rank_options(rows)
    return RentalOptions(ranked, _explain_choice(ranked, query, offer))


def find_options_or_recompute(
    query: RentalQuery,
    recomputed: Mapping[int, Profile],
    offer: InstanceOffer,
    *,
    explain: bool = True,
    only_best: bool = False,
) -> tuple[RentalQuery, RentalOptions]:
    """The options, and the query that found them: with the profiles of `recomputed` activations if nothing fits
    otherwise, or if only then the best strategy has room for what it keeps, and trains faster."""
    again = replace(query, profiles=recomputed)
    try:
        found = find_rental_options(query, offer, explain=explain, only_best=only_best)
    except PlanError:
        if not recomputed:
            raise
        return again, find_rental_options(again, offer, explain=explain, only_best=only_best)
    if recomputed and not found.table[0].memory.saved_weights:
        with suppress(PlanError):
            other = find_rental_options(again, offer, explain=False, only_best=only_best)
            if other.table[0].goodput > found.table[0].goodput:
                return again, other
    return query, found


@dataclass(frozen=True)
class _ShapeDraft:
    """A shape that fits and is not planned yet."""

    case: PlanCase
    cuts: Cuts
    micro_batch: int
    nodes: int
    limits: tuple[int, ...]
    """By stage: the most activations that a run keeps under `planned`: no more memory than 1F1B needs."""

    @cached_property
    def least_step_s(self) -> float:
        return step_lower_bound(replace(self.case, memory=self.limits))

    def usd_per_h(self, offer: InstanceOffer) -> float:
        return self.nodes * offer.usd_per_h


@dataclass(frozen=True)
class _ShapeSpace:
    """What decides which shapes fit: neither price nor risk does, so offers of one machine share them."""

    profiles: tuple[Profile, ...]
    """By ascending micro-batch size."""
    global_batch: int
    node_range: tuple[int, int]
    pipelines: int | None
    stages: int | None
    keeps_outputs: tuple[bool, bool]
    """Whether the strategy that keeps least and the one that keeps most keep outputs."""
    memory: int
    links: NodeLinks


def _fitting_shapes(query: RentalQuery, offer: InstanceOffer) -> tuple[_ShapeDraft, ...]:
    keeps = [strategy.keeps_outputs for strategy in query.strategies]
    return _shapes_in_space(
        _ShapeSpace(
            profiles=tuple(query.profiles.values()),
            global_batch=query.global_batch,
            node_range=query.node_range,
            pipelines=query.pipelines,
            stages=query.stages,
            keeps_outputs=(min(keeps), max(keeps)),
            memory=offer.memory,
            links=offer.links,
        )
    )


@lru_cache(maxsize=64)
def _shapes_in_space(space: _ShapeSpace) -> tuple[_ShapeDraft, ...]:
    workers = space.links.workers
    low, high = (space.node_range[0] - 1) * workers + 1, space.node_range[1] * workers
    found = []
    for profile in space.profiles:
        M = space.global_batch // profile.micro_batch
        room_for, capped = (with_overhead(profile.layers, keeps_outputs=keeps) for keeps in space.keeps_outputs)
        for P in _candidate_depths(space, len(profile.layers), high):
            cut = cache(lambda m, P=P, layers=room_for: _cut_layers(layers, P, m, space.memory))
            for D in _candidate_pipeline_counts(space, P, low, high, M):
                cuts = cut(min(P, -(-M // D)))
                if cuts is not None:
                    limits = tuple(capacities_of_1f1b(profile.layers, cuts, -(-M // D)))
                    found.append(_make_draft(capped, cuts, profile.micro_batch, D, M, space, limits))
    return tuple(found)


def _candidate_depths(space: _ShapeSpace, layers: int, workers: int) -> list[int]:
    """Depths to try: a deeper pipeline has to make the longest stage shorter."""
    if space.stages:
        return [space.stages] if space.stages <= min(layers, workers) else []
    return [P for P in range(1, min(layers, workers) + 1) if P == 1 or -(-layers // P) < -(-layers // (P - 1))]


def _candidate_pipeline_counts(space: _ShapeSpace, stages: int, low: int, high: int, micro_batches: int) -> range:
    if space.pipelines:
        fits = space.pipelines * stages <= high and space.pipelines <= micro_batches
        return range(space.pipelines, space.pipelines + 1) if fits else range(0)
    return range(max(1, -(-low // stages)), min(high // stages, micro_batches) + 1)


@lru_cache(maxsize=50_000)
def _cut_layers(layers: tuple[LayerCost, ...], stages: int, micro: int, memory: int) -> Cuts | None:
    return find_cuts(layers, stages, memory=memory, in_flight=in_flight_1f1b(micro))


def _make_draft(
    layers: tuple[LayerCost, ...],
    cuts: Cuts,
    micro_batch: int,
    D: int,
    M: int,
    space: _ShapeSpace,
    limits: tuple[int, ...],
) -> _ShapeDraft:
    """`layers` are those with the overhead of the strategy that keeps most, which limits the live activations."""
    segments = _cut_segments(layers, cuts)
    P, m = len(segments), -(-M // D)
    resident = [sum(layer.resident_bytes for layer in segment) for segment in segments]
    activation = [sum(layer.activation_bytes for layer in segment) for segment in segments]
    case = PlanCase(
        pipelines=D,
        stages=P,
        micro_batches=M,
        costs=without_first_input_gradient(stage_costs(segments, D, space.links)),
        memory=_activation_limit(resident, activation, space.memory, P, m),
        early_sends=knows_split_overhead(layers),
    )
    return _ShapeDraft(case, cuts, micro_batch, -(-D * P // space.links.workers), limits)


def _cut_segments(layers: tuple[LayerCost, ...], cuts: Cuts) -> list[tuple[LayerCost, ...]]:
    return [layers[span.start : span.stop] for span in segment_layer_ranges(cuts, len(layers))]


def _activation_limit(
    resident: list[int], activation: list[int], memory: int, stages: int, micro: int
) -> ActivationLimit:
    """Live activations that fit into every stage; "1f1b" where 1F1B needs more in the first stages."""
    room = min((memory - r) // a if a else micro for r, a in zip(resident, activation, strict=True))
    if room >= micro:
        return None
    return room if room >= stages else "1f1b"


def _most_promising(drafts: list[_ShapeDraft], many: int) -> list[_ShapeDraft]:
    """The drafts that are fastest by their lower bound, then those that are fastest per node.

    Of the drafts of one shape with several micro-batch sizes only the fastest is kept.
    """
    shapes: dict[tuple[int, int], _ShapeDraft] = {}
    for draft in sorted(drafts, key=lambda draft: (draft.least_step_s, draft.nodes)):
        shapes.setdefault((draft.case.pipelines, draft.case.stages), draft)
    fast = list(shapes.values())[: many - many // 3]
    others = sorted(list(shapes.values())[len(fast) :], key=lambda draft: draft.least_step_s * draft.nodes)
    return fast + others[: many // 3]


def _is_slower(draft: _ShapeDraft, query: RentalQuery, goodput: float) -> bool:
    """Whether the lower bound of its steps shows that a shape reaches no more than this goodput."""
    if query.schedule in (PLANNED, AUTO):
        least_s = len(draft.case.micros_by_pipeline[0]) * slowest_stage_s(draft.case)
    elif query.schedule == "1f1b" and not draft.case.early_sends:
        least_s = step_lower_bound(replace(draft.case, split=False, memory="1f1b"))
    else:
        least_s = step_lower_bound(replace(draft.case, memory=None))
    return query.global_batch / least_s * (1 + 1e-9) < goodput


def _make_option(draft: _ShapeDraft, query: RentalQuery, offer: InstanceOffer) -> RentalOption | None:
    case = draft.case
    if query.schedule in (PLANNED, AUTO):
        case = replace(case, two_ranges=_two_ranges(query.profiles[draft.micro_batch].layers, draft, offer.links))
    schedule = resolve_schedule(case, query.schedule, draft.limits)
    healthy_s = failure_free_step_s(case, schedule, draft.limits)
    best = _best_strategy(draft, healthy_s, query, offer)
    if best is None:
        return None
    strategy, goodput = best
    layers = query.profiles[draft.micro_batch].layers
    return RentalOption(
        case=case,
        limits=draft.limits,
        cuts=draft.cuts,
        micro_batch=draft.micro_batch,
        nodes=draft.nodes,
        strategy=goodput.strategy,
        checkpoint_interval_s=goodput.checkpoint_interval_s,
        zones=min(offer.zones, strategy.zones_wanted(draft.case)),
        schedule=schedule,
        failure_free_step_s=healthy_s,
        goodput=query.global_batch / goodput.step_s * goodput.useful_share,
        usd_per_h=draft.usd_per_h(offer),
        mean_nodes_present=1 - query.risk.mean_missing_nodes(draft.nodes) / draft.nodes,
        memory=_fullest_worker(layers, draft, strategy, offer),
        least_stages=_least_stages(with_overhead(layers, keeps_outputs=strategy.keeps_outputs), draft, offer.memory),
    )


def _two_ranges(layers: tuple[LayerCost, ...], draft: _ShapeDraft, links: NodeLinks) -> TwoRanges | None:
    """The model cut into two segments per worker, as a run cuts it, with no more memory than 1F1B needs; None: there
    are too few layers."""
    step = ScheduledStep(
        layers=layers,
        cuts=draft.cuts,
        pipelines=draft.case.pipelines,
        stages=draft.case.stages,
        micro_batches=draft.case.micro_batches,
        may_use_two_ranges=True,
        links=links,
    )
    return step.planner_shape.two_ranges


def _least_stages(layers: tuple[LayerCost, ...], draft: _ShapeDraft, memory: int) -> int:
    """The fewest stages that fit with the micro-batches of the draft's pipelines: fits are monotonic in the depth."""
    micro = len(draft.case.micros_by_pipeline[0])
    fits = range(1, draft.case.stages + 1)
    return 1 + bisect_left(fits, True, key=lambda P: draft.case.stages == P or _fits_at_depth(layers, P, micro, memory))


@cache
def _fits_at_depth(layers: tuple[LayerCost, ...], stages: int, micro: int, memory: int) -> bool:
    return _cut_layers(layers, stages, min(stages, micro), memory) is not None


def _fullest_worker(
    layers: tuple[LayerCost, ...], draft: _ShapeDraft, strategy: EstimatedStrategy, offer: InstanceOffer
) -> WorkerMemory:
    return fullest_worker(
        _cut_segments(layers, draft.cuts),
        len(draft.case.micros_by_pipeline[0]),
        pipelines=draft.case.pipelines,
        strategy=strategy,
        on_accelerator=offer.on_accelerator,
    )


def _best_strategy(
    draft: _ShapeDraft, healthy_s: float, query: RentalQuery, offer: InstanceOffer
) -> tuple[EstimatedStrategy, StrategyGoodput] | None:
    """The strategy with the highest goodput among those that fit into the memory; None if there is none."""
    layers = query.profiles[draft.micro_batch].layers
    state = 12 / 16 * sum(layer.parameter_bytes + layer.state_bytes for layer in layers)
    run = GoodputInputs(
        case=draft.case, failure_free_step_s=healthy_s, nodes=draft.nodes, state_bytes=state, risk=query.risk
    )
    fits: dict[tuple[bool, bool, bool], bool] = {}
    for each in query.strategies:
        kept = (each.keeps_outputs, each.shadows_every_stage, each.eager_forwards)
        if kept not in fits:
            fits[kept] = _fullest_worker(layers, draft, each, offer).total <= offer.memory
    fitting = [
        each for each in query.strategies if fits[each.keeps_outputs, each.shadows_every_stage, each.eager_forwards]
    ]
    estimates = [(each, goodput) for each in fitting if (goodput := each.estimate(run)) is not None]
    return max(estimates, key=lambda pair: pair[1].useful_share / pair[1].step_s, default=None)


def _rank_options(rows: list[RentalOption]) -> tuple[RentalOption, ...]:
    """The best option first, then the others by goodput."""
    fastest = max(row.goodput for row in rows)
    winner = min(
        (row for row in rows if row.goodput >= (1 - GOODPUT_TOLERANCE) * fastest), key=lambda row: row.usd_per_million
    )
    others = sorted((row for row in rows if row is not winner), key=lambda row: (-row.goodput, row.usd_per_h))
    return (winner, *others)


def _explain_choice(ranked: tuple[RentalOption, ...], query: RentalQuery, offer: InstanceOffer) -> str:
    best = ranked[0]
    reason = (
        f"{best.shape} on {count_noun(best.nodes, 'node')} of {offer.instance}: {best.goodput:.4g} samples/s for "
        f"{best.usd_per_h:.2f} $/h at {query.risk.preemption_rate:.0%} preemptions per hour, with {best.strategy}"
    )
    if len(ranked) > 1:
        second = ranked[1]
        reason += (
            f"; next is {second.shape} on {second.nodes} with micro-batches of {second.micro_batch}: "
            f"{second.goodput:.4g} for {second.usd_per_h:.2f}"
        )
    cheapest = min(ranked, key=lambda row: row.usd_per_million)
    if cheapest is not best:
        reason += (
            f"; least per sample: {cheapest.shape} on {cheapest.nodes}, {cheapest.usd_per_million:.2f} $ a million "
            f"against {best.usd_per_million:.2f}"
        )
    return reason


def _explain_nothing_fits(query: RentalQuery, offer: InstanceOffer) -> str:
    """Why no shape fits (budget, nodes or memory), and the nearest one that would."""
    affordable = _fitting_shapes(query, offer)
    if affordable:
        least = min(draft.usd_per_h(offer) for draft in affordable)
        return (
            f"budget is {query.budget_usd_per_h:g}/h, but the cheapest shape that fits takes {least:.2f} $/h "
            f"({count_noun(min(draft.nodes for draft in affordable), 'node')} of {offer.instance}): use --budget "
            f"{math.ceil(least)}/h"
        )
    more = replace(query, node_range=(1, max(4096, query.node_range[1])), budget_usd_per_h=math.inf)
    nearest = min(_fitting_shapes(more, offer), key=lambda draft: abs(draft.nodes - query.node_range[1]), default=None)
    if nearest is not None:
        needs = f"the nearest that fits is {nearest.case.pipelines} x {nearest.case.stages}"
        return (
            f"nothing fits on {query.node_range[0]}..{query.node_range[1]} nodes: {needs}; use --nodes {nearest.nodes}"
        )
    smallest = query.profiles[min(query.profiles)]
    return _explain_model_too_large(smallest, query, offer)


def _explain_model_too_large(profile: Profile, query: RentalQuery, offer: InstanceOffer) -> str:
    """Why the model fits on no number of nodes."""
    layers, M = len(profile.layers), query.global_batch // profile.micro_batch
    if query.stages and query.stages > layers:
        return f"stages is {query.stages}: {count_noun(layers, 'layer')} fill at most as many; use --stages {layers}"
    if query.pipelines and query.pipelines > M:
        only = f"a step has only {count_noun(M, 'micro-batch')}"
        return f"pipelines is {query.pipelines}, but {only}: use --pipelines {M}, or a larger batch"
    least = min(query.strategies, key=lambda strategy: strategy.keeps_outputs)
    layers_needed = with_overhead(profile.layers, keeps_outputs=least.keeps_outputs)
    fullest = max(layers_needed, key=lambda layer: layer.resident_bytes + layer.activation_bytes)
    needed = fullest.resident_bytes + fullest.activation_bytes
    number = next(index for index, layer in enumerate(profile.layers) if layer.name == fullest.name)
    room = f"the model does not fit on {offer.instance}: {format_bytes(offer.memory)} of a worker can be used, and"
    if needed <= offer.memory:
        depth = f"a pipeline of {count_noun(query.stages, 'stage')}" if query.stages else "every depth"
        return f"{room} {depth} needs more for activations in flight: use another depth, or a device with more"
    larger = [device for device in ACCELERATORS.values() if device.memory * USABLE_MEMORY_SHARE >= needed]
    use = f"use a device with more, as {min(larger, key=lambda d: d.memory).name}" if larger else "no device has more"
    return f"{room} layer {number} ({fullest.name}) alone needs {format_bytes(needed)}; {use}"
