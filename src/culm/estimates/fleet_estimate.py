"""`culm.find_fleets`: which machines to rent for a model, by time and cost."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from culm.errors import PlanError, UsageError
from culm.estimates import plan_inputs
from culm.estimates.schedule_choice import default_schedule, parse_schedule
from culm.market.catalogue import PricedInstance, load_catalogue, parse_date
from culm.plan.model.accelerators import ACCELERATORS, find_accelerator
from culm.plan.rent.fleet_search import (
    ANY_NODE_COUNT,
    Fleet,
    FleetAnswer,
    FleetGoal,
    FleetOffer,
    choose_fleets,
    estimate_fleets,
    explain_closest,
    explain_infeasible,
)
from culm.plan.rent.rental_options import RentalQuery
from culm.plan.rent.strategy_goodput import PreemptionRisk
from culm.price_lists import current_date
from culm.sim.fleet_spread import SIMULATED_MARKETS, FleetSpread, simulate_spread

if TYPE_CHECKING:
    from culm.plan.model.model_profile import Profile
    from culm.plan.model.reference_models import ReferenceModel
    from culm.strategies.strategy import Strategy

DEFAULT_TOKENS = 1e9
_MICRO_BATCHES = (1, 2, 4, 8)
MAX_ROWS = 12
SearchProgress: TypeAlias = Callable[[int, int, str], None]
"""Called with the number done, the number of all and what is next."""


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """What a search over instances gets. None: not limited, or the default."""

    model: str
    instance: str | None
    nodes: tuple[int, int] | None
    """The least and the most."""
    budget_usd_per_h: float
    tokens: float | None
    deadline_h: float
    max_usd: float
    batch: int | None
    micro_batch: int | None
    precision: str | None
    recompute: bool
    preemption_rate: float
    on_demand: bool
    """Whether only on-demand prices are used."""
    strategies: Sequence[Strategy]
    schedule: str
    pipelines: int | None
    stages: int | None
    prices: Path | None
    on: str | None


@dataclass(frozen=True)
class FleetPlan:
    """The fleets that `culm.find_fleets` has found."""

    model: str
    answer: FleetAnswer
    """`cheapest` and `fastest` of the fleets within the limits, and `frontier()`."""
    spreads: dict[int, FleetSpread]
    """By id of a fleet of the answer: its time and cost in simulated markets. On-demand fleets have none."""
    notes: tuple[str, ...]
    """What was assumed, and warnings about prices."""


def find_fleets(
    model: str,
    *,
    tokens: float | None = None,
    deadline_h: float | None = None,
    budget_usd_per_h: float | None = None,
    max_usd: float | None = None,
    instance: str | None = None,
    nodes: int | tuple[int, int] | None = None,
    pipelines: int | None = None,
    stages: int | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    precision: str | None = None,
    recompute: bool = False,
    on_demand: bool = False,
    preemption_rate: float = PreemptionRisk().preemption_rate,
    strategies: Sequence[str] = (),
    schedule: str | None = None,
    prices: str | os.PathLike[str] | None = None,
    on: str | None = None,
) -> FleetPlan:
    """Which machines to rent for a model, as `culm plan --model NAME --tokens N` does: estimates every instance with a
    price, and simulates the best ones in spot markets.

    `model`: a well-known one such as llama-3-8b, or a Hugging Face config.json. `tokens` to train. Limits:
    `deadline_h` hours, `budget_usd_per_h` dollars per hour, `max_usd` dollars for the whole run. `instance`, `nodes`
    (one number, or least and most), `pipelines`, `stages`, `batch` (samples of a step), `micro_batch`, `precision`
    (fp32 or bf16), `strategies` and `schedule`: consider only these. `recompute`: activations. `on_demand`: no spot
    prices. `preemption_rate`: share of spot nodes lost per hour. `prices`: a CSV file of your own; `on`: those of a
    day. Raises PlanError if no fleet is within the limits.
    """
    request = FleetRequest(
        model=model,
        instance=instance,
        nodes=(nodes, nodes) if isinstance(nodes, int) else nodes,
        budget_usd_per_h=math.inf if budget_usd_per_h is None else budget_usd_per_h,
        tokens=tokens,
        deadline_h=math.inf if deadline_h is None else deadline_h,
        max_usd=math.inf if max_usd is None else max_usd,
        batch=batch,
        micro_batch=micro_batch,
        precision=precision,
        recompute=recompute,
        preemption_rate=preemption_rate,
        on_demand=on_demand,
        strategies=plan_inputs.considered_strategies(strategies),
        schedule=parse_schedule(schedule) or default_schedule(),
        pipelines=pipelines,
        stages=stages,
        prices=None if prices is None else Path(prices),
        on=on,
    )
    return search_fleets(request)


def _no_progress(text: str) -> AbstractContextManager[SearchProgress]:
    del text
    return nullcontext(lambda *_: None)


def search_fleets(
    request: FleetRequest,
    progress: Callable[[str], AbstractContextManager[SearchProgress]] = _no_progress,
    on_estimated: Callable[[FleetAnswer], None] = lambda _: None,
) -> FleetPlan:
    """Estimate all fleets, and simulate those worth a look. An interrupt ends the part in which it comes; a note says
    so. `on_estimated` gets the answer by estimate. Raises PlanError if no fleet is within the limits."""
    model = plan_inputs.load_model(request.model)
    goal, assumed = _goal(request, model)
    offers = _list_offers(request, model)
    base, fleets, notes = _base_query(request, model, offers), list[Fleet](), list(assumed)
    try:
        with progress("estimating fleets") as report:
            for fleet in estimate_fleets(offers, base, goal, progress=report):
                fleets.append(fleet)
    except KeyboardInterrupt:
        if not fleets:
            raise
        tried = len({id(fleet.source) for fleet in fleets})
        notes.insert(0, f"interrupted: only {tried} of {len(offers)} offers were compared, and no market was simulated")
    answer = choose_fleets(fleets, goal)
    on_estimated(answer)
    if answer.cheapest is None or answer.fastest is None:
        raise PlanError(explain_infeasible(answer))
    shown = fleets_to_show(answer)
    spreads: dict[int, FleetSpread] = {}
    if len(notes) == len(assumed):
        try:
            with progress("simulating markets") as report:
                finalists, spreads = _simulate(shown, goal, report)
            answer = answer.with_finalists(finalists)
        except KeyboardInterrupt:
            notes.insert(0, "interrupted: times and costs are estimates, no market was simulated")
    if answer.cheapest is None:
        raise PlanError(
            f"in simulated markets no fleet is within the limits; by estimate, {explain_closest(shown, goal)}"
        )
    notes += _price_notes(request, shown)
    return FleetPlan(model.name, answer, spreads, tuple(notes))


def _goal(request: FleetRequest, model: ReferenceModel) -> tuple[FleetGoal, list[str]]:
    """The goal in samples, and a note if its size was assumed."""
    if request.tokens is not None and not model.sequence:
        raise UsageError(f"--tokens is given, but samples of {model.name} have no tokens: use another model")
    tokens = DEFAULT_TOKENS if request.tokens is None else request.tokens
    samples = tokens / model.sequence if model.sequence else DEFAULT_TOKENS / 1000
    unit = "1B tokens" if model.sequence else "1M samples"
    assumed = [] if request.tokens else [f"times and costs are for {unit}: set --tokens to change that"]
    return FleetGoal(
        samples=samples,
        deadline_h=request.deadline_h,
        budget_usd_per_h=request.budget_usd_per_h,
        max_usd=request.max_usd,
    ), assumed


def fleets_to_show(answer: FleetAnswer) -> list[Fleet]:
    """The frontier, then the cheapest other instances, at most `MAX_ROWS`; the cheapest first. Of an answer with
    finalists: those within the limits."""
    if answer.finalists is not None:
        return answer.feasible
    frontier = answer.frontier()
    most = MAX_ROWS - 3
    thinned = (
        frontier if len(frontier) <= most else [frontier[i * (len(frontier) - 1) // (most - 1)] for i in range(most)]
    )
    shown = {id(fleet): fleet for fleet in thinned}
    kinds = {(fleet.source.offer.instance, fleet.source.spot) for fleet in thinned}
    for fleet in answer.feasible:
        if len(shown) >= MAX_ROWS:
            break
        kind = (fleet.source.offer.instance, fleet.source.spot)
        if kind not in kinds:
            kinds.add(kind)
            shown[id(fleet)] = fleet
    return sorted(shown.values(), key=lambda fleet: (fleet.usd, fleet.hours))


def _base_query(request: FleetRequest, model: ReferenceModel, offers: Sequence[FleetOffer]) -> RentalQuery:
    nodes = request.nodes or ANY_NODE_COUNT
    return RentalQuery(
        profiles=offers[0].profiles,
        global_batch=request.batch or model.global_batch,
        node_range=nodes,
        strategies=request.strategies,
        schedule=request.schedule,
        pipelines=request.pipelines,
        stages=request.stages,
    )


def _list_offers(request: FleetRequest, model: ReferenceModel) -> list[FleetOffer]:
    """Every instance with an accelerator that culm has figures for, on spot and on demand where a price is known.

    A spot price that equals the on-demand price is not a spot price.
    """
    catalogue = load_catalogue(request.prices)
    names = [request.instance] if request.instance else catalogue.names
    offers = []
    for name in names:
        machine = catalogue.find(name) if request.on is None else _find_on(catalogue.find, name, request.on)
        if machine is None or not machine.gpu_count or machine.gpu not in ACCELERATORS:
            continue
        kinds = [False] if request.on_demand else [True, False]
        offers += [_make_offer(request, model, machine, spot=spot) for spot in kinds if _has_price(machine, spot=spot)]
    if not offers:
        raise UsageError("no instance has a price: give prices with --prices CSV")
    return offers


def _find_on(find: Callable[[str, str], PricedInstance], name: str, on: str) -> PricedInstance | None:
    try:
        return find(name, on)
    except UsageError:
        return None


def _has_price(machine: PricedInstance, *, spot: bool) -> bool:
    if spot:
        return machine.spot_usd_h is not None and not machine.spot_equals_on_demand
    return machine.on_demand_usd_h is not None


def _make_offer(request: FleetRequest, model: ReferenceModel, machine: PricedInstance, *, spot: bool) -> FleetOffer:
    batch = request.batch or model.global_batch
    sizes = [request.micro_batch] if request.micro_batch else [size for size in _MICRO_BATCHES if not batch % size]
    profiles = {
        again: {size: _profile(model, machine.gpu, size, request.precision, again) for size in sizes}
        for again in (False, True)
    }
    return FleetOffer(
        cloud=machine.cloud,
        spot=spot,
        offer=plan_inputs.node_offer(machine, spot=spot),
        is_old=machine.is_old(parse_date(request.on) or current_date()),
        profiles=profiles[request.recompute],
        recompute_profiles=profiles[True],
        risk=PreemptionRisk(preemption_rate=request.preemption_rate if spot else 0.0),
    )


@cache
def _profile(model: ReferenceModel, gpu: str, micro_batch: int, precision: str | None, recompute: bool) -> Profile:
    """The same object for all instances with one kind of GPU."""
    device = find_accelerator(gpu)
    return model.profile(device, micro_batch, precision=precision or device.default_precision, recompute=recompute)


def _simulate(
    fleets: Sequence[Fleet], goal: FleetGoal, progress: Callable[[int, int, str], None]
) -> tuple[list[Fleet], dict[int, FleetSpread]]:
    """The fleets, those on spot with the median time and cost of simulated markets; and their spread, by id."""
    spreads, finalists = {}, []
    for done, fleet in enumerate(fleets):
        progress(done, len(fleets), fleet.title)
        found = simulate_spread(fleet, goal)
        finalists.append(fleet if found is None else replace(fleet, hours=found.hours[1], usd=found.usd[1]))
        if found is not None:
            spreads[id(finalists[-1])] = found
    progress(len(fleets), len(fleets), f"{SIMULATED_MARKETS} markets each")
    return finalists, spreads


def _price_notes(request: FleetRequest, fleets: Sequence[Fleet]) -> list[str]:
    """Warnings about the prices of the shown fleets."""
    today = parse_date(request.on) or current_date()
    catalogue = load_catalogue(request.prices)
    notes: list[str] = []
    for name in dict.fromkeys(fleet.source.offer.instance for fleet in fleets):
        notes += catalogue.find(name, request.on).price_warnings(today, spot=False)
    return notes
