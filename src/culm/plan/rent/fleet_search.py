"""Which fleet to rent if the instance is open: every instance, node count and shape, spot and on demand. Pure.

A fleet is a number of nodes of one instance with a shape, a schedule and a strategy. It takes a time and a cost to
train the samples of a goal. The cheapest one within the deadline and the budget, and the fastest one, are the answers;
if no fleet meets both limits, `explain_infeasible` says by how much they are missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from culm.errors import PlanError
from culm.plan.rent.rental_options import InstanceOffer, RentalOption, RentalQuery, find_options_or_recompute
from culm.text_format import count_noun, format_hours

if TYPE_CHECKING:
    from culm.plan.model.model_profile import Profile
    from culm.plan.rent.strategy_goodput import PreemptionRisk

NODE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
ANY_NODE_COUNT = (NODE_COUNTS[0], NODE_COUNTS[-1])
"""The range of nodes if none is requested."""
MIN_WORKERS_TRIED = 64
"""Fleets of up to this many workers are tried for every model; larger ones if it needs many for its memory."""
MEMORY_MULTIPLE_TRIED = 4
"""Fleets with at most this many times the memory that the state of the model takes, beyond `MIN_WORKERS_TRIED`."""
SHAPES_PER_FLEET = 3
"""Shapes that are planned for one instance and node count."""


@dataclass(frozen=True, kw_only=True)
class FleetGoal:
    """What has to be trained, and the limits. Raises PlanError for a limit that is not above 0."""

    samples: float
    deadline_h: float = math.inf
    budget_usd_per_h: float = math.inf
    max_usd: float = math.inf
    """Dollars for the whole run."""

    def __post_init__(self) -> None:
        for name, value in (
            ("samples", self.samples),
            ("deadline", self.deadline_h),
            ("budget", self.budget_usd_per_h),
            ("max-cost", self.max_usd),
        ):
            if not value > 0:
                raise PlanError(f"{name} is {value:g}: use a number above 0")


@dataclass(frozen=True, kw_only=True)
class FleetOffer:
    """An instance, on spot or on demand, and what the model costs on it."""

    cloud: str
    spot: bool
    offer: InstanceOffer
    is_old: bool = False
    """Whether its price is so old that it may have changed."""
    profiles: Mapping[int, Profile]
    """By micro-batch size."""
    recompute_profiles: Mapping[int, Profile]
    """The same with recomputed activations, for where nothing fits otherwise."""
    risk: PreemptionRisk

    @property
    def market(self) -> str:
        return "spot" if self.spot else "on demand"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Nodes of one instance in one shape, with the time and cost that the goal takes."""

    source: FleetOffer
    query: RentalQuery
    """The query that found the option: its profiles are those of the option."""
    option: RentalOption
    hours: float
    """Expected time to train the samples of the goal."""
    usd: float
    """Expected cost of that."""

    @property
    def nodes(self) -> int:
        return self.option.nodes

    @property
    def title(self) -> str:
        return f"{self.nodes} x {self.source.offer.instance}, {self.source.market}"

    def meets(self, goal: FleetGoal) -> bool:
        affordable = self.option.usd_per_h <= goal.budget_usd_per_h and self.usd <= goal.max_usd
        return self.hours <= goal.deadline_h and affordable


@dataclass(frozen=True)
class FleetAnswer:
    """The answers to a goal, and the fleets they were chosen from."""

    goal: FleetGoal
    fleets: tuple[Fleet, ...]
    """All that were estimated, the cheapest first."""
    finalists: tuple[Fleet, ...] | None = None
    """Those that were simulated as well, with the time and cost of that; None: answers are chosen from `fleets`."""

    @property
    def feasible(self) -> list[Fleet]:
        """Within the deadline and the budget, the cheapest first."""
        found = self.fleets if self.finalists is None else self.finalists
        return [fleet for fleet in found if fleet.meets(self.goal)]

    @property
    def within_limits(self) -> int:
        """How many fleets are within the limits by estimate."""
        return sum(fleet.meets(self.goal) for fleet in self.fleets)

    def with_finalists(self, finalists: Iterable[Fleet]) -> FleetAnswer:
        """The same with answers chosen from these fleets."""
        return replace(self, finalists=tuple(sorted(finalists, key=lambda fleet: (fleet.usd, fleet.hours))))

    @property
    def eligible(self) -> list[Fleet]:
        """The feasible fleets with current prices: an old price may be wrong by half. All of them if every price is
        old."""
        feasible = self.feasible
        return [fleet for fleet in feasible if not fleet.source.is_old] or feasible

    @property
    def cheapest(self) -> Fleet | None:
        return next(iter(self.eligible), None)

    @property
    def fastest(self) -> Fleet | None:
        return min(self.eligible, key=lambda fleet: (fleet.hours, fleet.usd), default=None)

    @property
    def cheapest_by_old_price(self) -> Fleet | None:
        """The cheapest feasible fleet if its price is old and others are not: worth a look at today's price."""
        first = next(iter(self.feasible), None)
        return first if first is not self.cheapest else None

    def frontier(self) -> list[Fleet]:
        """The eligible fleets than which no other one is both faster and cheaper, the cheapest first."""
        found: list[Fleet] = []
        for fleet in self.eligible:
            if not found or fleet.hours < found[-1].hours:
                found.append(fleet)
        return found


def estimate_fleets(
    offers: Sequence[FleetOffer],
    base: RentalQuery,
    goal: FleetGoal,
    *,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> Iterator[Fleet]:
    """Estimate every offer at several node counts. `base` has the batch, the strategies, the schedule and the limits of
    the shape; `progress` is called before each offer."""
    for done, offer in enumerate(offers):
        progress(done, len(offers), f"{offer.offer.instance}, {offer.market}")
        yield from _fleets_of_offer(offer, base, goal)
    progress(len(offers), len(offers), "")


def choose_fleets(fleets: Iterable[Fleet], goal: FleetGoal) -> FleetAnswer:
    """The answer from estimated fleets. Raises PlanError if there are none."""
    ranked = tuple(sorted(fleets, key=lambda fleet: (fleet.usd, fleet.hours)))
    if not ranked:
        raise PlanError("the model fits on none of the instances: use --prices with larger ones, or a smaller model")
    return FleetAnswer(goal, ranked)


def _fleets_of_offer(source: FleetOffer, base: RentalQuery, goal: FleetGoal) -> Iterable[Fleet]:
    for nodes in _node_counts(source, base.node_range):
        found = _options_or_recompute(source, replace(base, node_range=(nodes, nodes), risk=source.risk))
        if found is None:
            continue
        query, options = found
        fastest = max(options, key=lambda row: row.goodput)  # with as many nodes, it costs least, too
        if fastest.goodput > 0:
            yield _make_fleet(source, query, fastest, goal)


def _make_fleet(source: FleetOffer, query: RentalQuery, option: RentalOption, goal: FleetGoal) -> Fleet:
    hours = goal.samples / option.goodput / 3600
    return Fleet(
        source=source, query=query, option=option, hours=hours, usd=option.usd_per_million * goal.samples / 1e6
    )


def _node_counts(source: FleetOffer, limits: tuple[int, int]) -> list[int]:
    """Node counts whose memory holds the state of the model, up to a multiple of it; if a range is requested, all of
    `NODE_COUNTS` in it that hold the state, and both of its ends."""
    layers = next(iter(source.profiles.values())).layers
    least = math.ceil(sum(layer.resident_bytes for layer in layers) / source.offer.memory)
    if limits == ANY_NODE_COUNT:
        counts, most = {*NODE_COUNTS}, max(MIN_WORKERS_TRIED, MEMORY_MULTIPLE_TRIED * least, source.offer.workers)
    else:
        counts, most = {*NODE_COUNTS, *limits}, limits[1] * source.offer.workers
    return [
        nodes
        for nodes in sorted(counts)
        if limits[0] <= nodes <= limits[1] and least <= nodes * source.offer.workers <= most
    ]


def _options_or_recompute(
    source: FleetOffer, query: RentalQuery
) -> tuple[RentalQuery, tuple[RentalOption, ...]] | None:
    tried = replace(query, profiles=source.profiles, max_shapes=SHAPES_PER_FLEET)
    with suppress(PlanError):
        used, options = find_options_or_recompute(
            tried, source.recompute_profiles, source.offer, explain=False, only_best=True
        )
        return used, options.table
    return None


def explain_infeasible(answer: FleetAnswer) -> str:
    """Why no fleet meets the goal, by how much it is missed, and which limits would be met."""
    goal, fleets = answer.goal, answer.fleets
    affordable = [fleet for fleet in fleets if fleet.option.usd_per_h <= goal.budget_usd_per_h]
    in_time = [fleet for fleet in fleets if fleet.hours <= goal.deadline_h]
    if not affordable:
        least = min(fleets, key=lambda fleet: fleet.option.usd_per_h)
        return (
            f"no fleet that holds the model costs {goal.budget_usd_per_h:g} $/h or less: the cheapest is {least.title} "
            f"for {least.option.usd_per_h:.2f} $/h; use --budget {math.ceil(least.option.usd_per_h)}/h"
        )
    cheap_enough = [fleet for fleet in affordable if fleet.usd <= goal.max_usd]
    if not cheap_enough:
        least = min(affordable, key=lambda fleet: fleet.usd)
        return (
            f"no fleet trains this for {goal.max_usd:,.0f} $ or less: the cheapest, {least.title}, takes "
            f"{least.usd:,.0f} $; use --max-cost {math.ceil(least.usd)}"
        )
    nearest = min(cheap_enough, key=lambda fleet: fleet.hours)
    times = nearest.hours / goal.deadline_h
    budget = f" for {goal.budget_usd_per_h:g} $/h" if math.isfinite(goal.budget_usd_per_h) else ""
    missed = (
        f"no fleet finishes within {format_hours(goal.deadline_h)}{budget}: the fastest, {nearest.title}, takes "
        f"{format_hours(nearest.hours)}, {times:.3g} times as long"
    )
    longer = f"use --deadline {math.ceil(nearest.hours)}h"
    if not in_time:
        fastest = min(fleets, key=lambda fleet: fleet.hours)
        more = "" if fastest is nearest else f", or at least {format_hours(fastest.hours)} with a larger budget"
        return f"{missed}; {longer}{more}"
    cheap = min(in_time, key=lambda fleet: fleet.option.usd_per_h)
    return f"{missed}; {longer}, or --budget {math.ceil(cheap.option.usd_per_h)}/h for {cheap.title}"


def explain_closest(fleets: Sequence[Fleet], goal: FleetGoal) -> str:
    """What the fastest affordable one of some fleets takes, and a deadline with a margin for it."""
    nearest = min(fleets, key=lambda fleet: fleet.hours)
    margin = math.ceil(1.2 * nearest.hours)
    return (
        f"{nearest.title} takes {format_hours(nearest.hours)} of {format_hours(goal.deadline_h)}; "
        f"use --deadline {margin}h, or a larger budget"
    )


def explain_fleet(fleet: Fleet, answer: FleetAnswer) -> list[str]:
    """Why a fleet was chosen: what it is, and what the nearest alternatives would take."""
    option, source = fleet.option, fleet.source
    workers = count_noun(option.workers, "accelerator")
    reasons = [
        f"{option.shape} pipelines x stages on {workers}, {option.schedule}, {option.strategy}: "
        f"{option.goodput:.4g} samples/s expected, {1 / option.failure_free_step_s * _batch(fleet):.4g} without losses"
    ]
    other_market = [
        other
        for other in answer.fleets
        if other.source.offer.instance == source.offer.instance
        and other.source.spot != source.spot
        and other.nodes == fleet.nodes
    ]
    if other_market:
        other = min(other_market, key=lambda each: each.usd)
        reasons.append(
            f"{other.source.market} it would take {format_hours(other.hours)} and {other.usd:,.0f} $ "
            f"({other.usd / fleet.usd - 1:+.0%})"
        )
    rivals = [each for each in answer.eligible if each.source.offer.instance != source.offer.instance]
    if rivals:
        rival = min(rivals, key=lambda each: (each.usd, each.hours))
        reasons.append(
            f"the cheapest other instance is {rival.title}: {rival.usd:,.0f} $ ({rival.usd / fleet.usd - 1:+.0%}) in "
            f"{format_hours(rival.hours)}"
        )
    late = [each for each in answer.fleets if each.usd < fleet.usd and each.hours > answer.goal.deadline_h]
    if late and fleet is answer.cheapest:
        reasons.append(f"{late[0].title} would cost {late[0].usd:,.0f} $, but takes {format_hours(late[0].hours)}")
    return reasons


def _batch(fleet: Fleet) -> int:
    return fleet.query.global_batch
