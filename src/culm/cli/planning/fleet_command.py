"""`culm plan --model NAME` without an instance: which fleet to rent for a deadline and a budget."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from culm.cli.planning import fleet_output, plan_inputs, plan_output
from culm.cli.planning.price_warnings import current_date
from culm.cli.progress_display import make_console
from culm.errors import PlanError, UsageError
from culm.market.catalogue import PricedInstance, load_catalogue, parse_date
from culm.plan.model.accelerators import ACCELERATORS, find_accelerator
from culm.plan.rent.fleet_search import (
    ANY_NODE_COUNT,
    Fleet,
    FleetGoal,
    FleetOffer,
    choose_fleets,
    estimate_fleets,
    explain_closest,
    explain_infeasible,
)
from culm.plan.rent.rental_options import RentalQuery
from culm.plan.rent.strategy_goodput import PreemptionRisk
from culm.sim.fleet_spread import SIMULATED_MARKETS, FleetSpread, simulate_spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from culm.plan.model.model_profile import Profile
    from culm.plan.model.reference_models import ReferenceModel
    from culm.strategies.strategy import Strategy

DEFAULT_TOKENS = 1e9
_MICRO_BATCHES = (1, 2, 4, 8)
_COUNT_UNITS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_TIME_UNITS = {"m": 1 / 60, "min": 1 / 60, "h": 1.0, "d": 24.0, "w": 168.0}


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    """The options of `culm plan` that a search over instances uses."""

    model: str
    instance: str | None
    nodes: str | None
    budget: str | None
    tokens: str | None
    deadline: str | None
    max_cost: float | None
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


def print_fleets(request: FleetRequest, *, out: str | None, plot: str | None, json_: bool) -> None:
    """Search, simulate the answers and print them. Raises PlanError if no fleet is within the limits."""
    model = plan_inputs.load_model(request.model)
    goal, assumed = _parse_goal(request, model)
    offers = _list_offers(request, model)
    base, fleets, notes = _base_query(request, model, offers), list[Fleet](), list(assumed)
    try:
        with show_progress("estimating fleets") as progress:
            for fleet in estimate_fleets(offers, base, goal, progress=progress):
                fleets.append(fleet)
    except KeyboardInterrupt:
        if not fleets:
            raise
        tried = len({id(fleet.source) for fleet in fleets})
        notes.insert(0, f"interrupted: only {tried} of {len(offers)} offers were compared, and no market was simulated")
    answer = choose_fleets(fleets, goal)
    if plot is not None:
        plan_output.write_text_file(plot, fleet_output.plot_html(answer, model.name))
    if answer.cheapest is None or answer.fastest is None:
        raise PlanError(explain_infeasible(answer))
    shown = fleet_output.fleets_to_show(answer)
    spreads: dict[int, FleetSpread] = {}
    if len(notes) == len(assumed):
        try:
            with show_progress("simulating markets") as progress:
                finalists, spreads = _simulate(shown, goal, progress)
            answer = answer.with_finalists(finalists)
        except KeyboardInterrupt:
            notes.insert(0, "interrupted: times and costs are estimates, no market was simulated")
    if answer.cheapest is None:
        raise PlanError(
            f"in simulated markets no fleet is within the limits; by estimate, {explain_closest(shown, goal)}"
        )
    if out is not None:
        best = answer.cheapest
        plan_output.write_text_file(out, plan_output.plan_toml(best.option, model.name, best.query, best.source.offer))
    notes += _price_notes(request, shown)
    if json_:
        print(json.dumps(fleet_output.answer_json(answer, spreads, notes)))
    else:
        fleet_output.print_answer(make_console(stderr=False), answer, spreads, model.name, notes)


def _parse_goal(request: FleetRequest, model: ReferenceModel) -> tuple[FleetGoal, list[str]]:
    """The goal in samples, and a note if its size was assumed."""
    if request.tokens is not None and not model.sequence:
        raise UsageError(f"--tokens is given, but samples of {model.name} have no tokens: use another model")
    tokens = parse_count(request.tokens) if request.tokens is not None else DEFAULT_TOKENS
    samples = tokens / model.sequence if model.sequence else DEFAULT_TOKENS / 1000
    unit = "1B tokens" if model.sequence else "1M samples"
    assumed = [] if request.tokens else [f"times and costs are for {unit}: set --tokens to change that"]
    deadline = parse_deadline(request.deadline)
    budget = plan_inputs.parse_budget(request.budget)
    return FleetGoal(
        samples=samples, deadline_h=deadline, budget_usd_per_h=budget, max_usd=request.max_cost or math.inf
    ), assumed


def parse_count(text: str) -> float:
    """Parse `--tokens 2B`. Raises UsageError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmbgt]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--tokens {text!r} is not a number of tokens: write it as in --tokens 2B")
    return float(match[1]) * _COUNT_UNITS[match[2]]


def parse_deadline(text: str | None) -> float:
    """Parse `--deadline 3d` to hours; infinite without it. Raises UsageError."""
    if text is None:
        return math.inf
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(min|m|h|d|w)", text.strip().lower())
    if match is None or not float(match[1]):
        raise UsageError(f"--deadline {text!r} is not a time: write it as in --deadline 3d or --deadline 36h")
    return float(match[1]) * _TIME_UNITS[match[2]]


def _base_query(request: FleetRequest, model: ReferenceModel, offers: Sequence[FleetOffer]) -> RentalQuery:
    nodes = ANY_NODE_COUNT if request.nodes is None else plan_inputs.parse_node_range(request.nodes)
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


@contextmanager
def show_progress(text: str, *, after_s: float = 2.0) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr that disappears at the end; without a terminal a line every `after_s` seconds."""
    console = make_console(stderr=True)
    columns = (TextColumn("{task.fields[label]}"), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    printed_at = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", label=text, total=None)

        def show(done: int, total: int, name: str) -> None:
            nonlocal printed_at
            bar.update(task, completed=done, total=total, description=name)
            if not console.is_terminal and done < total and time.monotonic() - printed_at >= after_s:
                printed_at = time.monotonic()
                console.print(f"{text}: {done} of {total} ({name})", markup=False, highlight=False)

        yield show
