"""The odds of a launch: how often its run keeps its deadline and its budget in simulated markets, before it is started.

The machines of the simulated run are rented by the function that `culm launch` uses, at the present prices. The speed
comes from a profile of the job, which was measured on such a machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, quantiles
from typing import TYPE_CHECKING

from culm.cli.simulating.deadline_output import wilson_interval
from culm.errors import PlanError, UsageError
from culm.estimates import plan_inputs
from culm.estimates.deadline_estimate import goal_of
from culm.estimates.strategy_estimate import window_of
from culm.market.market_trace import HOUR, MarketTrace
from culm.market.price_series import PriceSeries
from culm.market.trace_generator import MarketModel, generate_trace
from culm.market.trace_reader import read_trace
from culm.plan.model.model_profile import Profile
from culm.plan.rent.fleet_decision import FleetLimits, decide_fleet
from culm.plan.rent.rental_options import InstanceOffer, RentalQuery
from culm.plan.rent.strategy_goodput import PreemptionRisk, present_share
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.deadline_run import DeadlineOutcome, on_demand_only, simulate_deadline, spot_only
from culm.sim.planned_workload import planned_workload
from culm.sim.simulated_strategy import SimulationContext
from culm.text_format import count_noun

if TYPE_CHECKING:
    from culm.config import RunConfig
    from culm.job import Job
    from culm.machines.launch_order import LaunchOrder
    from culm.machines.machine_provider import Market

MARKETS = 20
_ZONES = 3
"""Zones of a simulated market, if none are named."""


@dataclass(frozen=True, kw_only=True)
class LaunchOdds:
    """The outcomes of a run in simulated markets."""

    outcomes: Sequence[DeadlineOutcome]
    limits: FleetLimits
    market: str
    """What the markets are like, in a few words."""
    profile: str
    """Where the speed comes from."""

    def sentence(self) -> str:
        """The odds in one sentence."""
        runs = len(self.outcomes)
        kept = sum(each.kept_both for each in self.outcomes)
        low, high = wilson_interval(kept, runs)
        promises = []
        if math.isfinite(self.limits.deadline_s):
            share = fmean(each.kept_deadline for each in self.outcomes)
            promises.append(f"the deadline of {self.limits.deadline_s / HOUR:g} h is kept in {share:.0%}")
        if math.isfinite(self.limits.budget_usd):
            share = fmean(each.kept_budget for each in self.outcomes)
            promises.append(f"the budget of ${self.limits.budget_usd:,.2f} in {share:.0%}")
        both = f", both in {kept / runs:.0%}" if len(promises) > 1 else ""
        interval = f" (95 % interval {low:.0%} to {high:.0%})" if runs > 1 else ""
        hours, usd = [each.seconds / HOUR for each in self.outcomes], [each.usd for each in self.outcomes]
        on_demand = fmean(each.on_demand_share for each in self.outcomes)
        return (
            f"in {count_noun(runs, 'simulated market')} ({self.market}) {' and '.join(promises)}{both}{interval}; "
            f"{_spread(hours, '{:.1f}')} h and ${_spread(usd, '{:,.2f}')}, "
            f"{on_demand:.0%} of the machine hours on demand; {self.profile}"
        )

    def as_json(self) -> dict[str, object]:
        """The figures behind the sentence."""
        return {
            "markets": len(self.outcomes),
            "kept_deadline": fmean(each.kept_deadline for each in self.outcomes),
            "kept_budget": fmean(each.kept_budget for each in self.outcomes),
            "kept_both": fmean(each.kept_both for each in self.outcomes),
            "hours": fmean(each.seconds / HOUR for each in self.outcomes),
            "usd": fmean(each.usd for each in self.outcomes),
            "on_demand_share": fmean(each.on_demand_share for each in self.outcomes),
        }


def find_odds(
    load: Callable[[], Job],
    config: RunConfig,
    order: LaunchOrder,
    nodes: int,
    prices: Mapping[Market, float],
    *,
    markets: int = MARKETS,
) -> LaunchOdds:
    """Simulate the run of a launch. `load` returns its job; `prices`: dollars per hour of the cheapest machine of each
    market.

    Raises UsageError or PlanError in one sentence if the odds cannot be known.
    """
    limits = FleetLimits(
        budget_usd=math.inf if config.budget is None else config.budget,
        deadline_s=math.inf if config.deadline is None else config.deadline,
        max_price_usd_h=math.inf if order.max_price is None else order.max_price,
    )
    if not prices:
        raise UsageError("no price of these machines is known: give it with --price")
    if config.profile is None:
        raise UsageError("measure the job on such a machine with culm profile JOB --out FILE, and add --profile FILE")
    job = load()
    profile = _load_profile(config.profile, job)
    spot = prices.get("spot")
    offer = _offer(order, config, min(prices.values()), spot=spot is not None)
    context, strategy = _context(job, config, profile, offer, nodes)
    goal = goal_of(context, limits, float(job.steps * job.global_batch))
    policy = on_demand_only if spot is None else decide_fleet if "on-demand" in prices else spot_only
    market, words = _market(order, config, nodes, goal.horizon_s, spot=spot is not None)
    on_demand_usd_h = prices.get("on-demand", math.inf if spot is None else spot)
    simulate = partial(simulate_deadline, context, strategy, on_demand_usd_h=on_demand_usd_h, goal=goal, policy=policy)
    series = PriceSeries.constant(spot if spot is not None else on_demand_usd_h)
    outcomes = [simulate(market=market(seed), prices=series) for seed in range(1 if spot is None else markets)]
    about = f"speed as {profile.source} on {profile.device}"
    return LaunchOdds(outcomes=outcomes, limits=limits, market=words, profile=about)


def _load_profile(path: str, job: Job) -> Profile:
    profile = Profile.load(path)
    if profile.micro_batch != job.micro_batch:
        raise UsageError(
            f"--profile was measured with micro-batches of {profile.micro_batch}, and the job has {job.micro_batch}: "
            "measure it again"
        )
    return profile


def _offer(order: LaunchOrder, config: RunConfig, usd_per_h: float, *, spot: bool) -> InstanceOffer:
    """What a machine offers, from the catalogue if that has its type."""
    instance = order.requests[0].instance
    try:
        found = plan_inputs.node_offer(plan_inputs.find_machine(instance) if instance else None, spot=spot)
    except UsageError:
        found = plan_inputs.node_offer(None, spot=spot)
    return replace(found, usd_per_h=usd_per_h, workers=config.node_workers)


def _context(
    job: Job, config: RunConfig, profile: Profile, offer: InstanceOffer, nodes: int
) -> tuple[SimulationContext, str]:
    """The simulated run, and the name of its strategy."""
    query = RentalQuery(
        profiles={profile.micro_batch: profile},
        global_batch=job.global_batch,
        node_range=(nodes, nodes),
        strategies=plan_inputs.considered_strategies([config.strategy]),
        pipelines=config.pipelines,
        stages=config.stages,
        schedule=config.schedule,
        risk=PreemptionRisk(preemption_rate=config.preemption_rate),
    )
    inputs = plan_inputs.PlanInputs("job", query.profiles, query.global_batch)
    options, used, _ = plan_inputs.find_options_or_recompute(inputs, query, offer)
    row = options.table[0]
    workload = planned_workload(row, "job", used, offer)
    return SimulationContext.create(workload, ClusterCosts(), config.reconfigure), row.strategy


def _market(
    order: LaunchOrder, config: RunConfig, nodes: int, horizon_s: float, *, spot: bool
) -> tuple[Callable[[int], MarketTrace], str]:
    """The market of a seed over a horizon, and what it is like: that of `--on trace`, else a generated one."""
    if not spot:
        return lambda _: MarketTrace((), horizon_s, "on demand"), "on-demand machines, none is lost"
    if "trace" in order.options:
        trace = read_trace(order.options["trace"])
        return lambda seed: window_of(trace, seed, horizon_s), f"windows of {trace.source}"
    rate = config.preemption_rate
    risk = PreemptionRisk(preemption_rate=rate)
    model = MarketModel(
        nodes=nodes,
        hours=horizon_s / HOUR,
        rate=rate,
        group=risk.mean_group_size,
        zones=len({request.zone for request in order.requests if request.zone}) or _ZONES,
        available=max(0.01, present_share(rate, risk.replace_s)),
    )
    return lambda seed: generate_trace(model, seed), f"{rate:.0%} of the spot machines are lost per hour"


def _spread(values: Sequence[float], shown: str) -> str:
    """The median and the range of eight tenths of the values."""
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    middle, low, high = (shown.format(tenths[number]) for number in (4, 0, 8))
    return middle if low == high else f"{middle} ({low} to {high})"


def odds_or_reason(
    load: Callable[[], Job], config: RunConfig, order: LaunchOrder, nodes: int, prices: Mapping[Market, float]
) -> tuple[dict[str, object], str]:
    """(the odds as JSON, a sentence about them); empty, with the reason, if they cannot be known."""
    try:
        found = find_odds(load, config, order, nodes, prices)
    except (PlanError, UsageError) as error:
        return {}, f"the odds are not known: {error}"
    return found.as_json(), found.sentence()
