"""Runs with a budget and a deadline in simulated markets."""

from __future__ import annotations

import json
import math

import pytest
from tests.sim.test_simulated_runs import SCENE, WORK, trace

from culm.cli import main
from culm.cli.simulating.deadline_output import wilson_interval
from culm.market import MarketModel, generate_trace
from culm.market.price_series import PriceMove, PriceSeries
from culm.plan.rent.fleet_decision import FleetLimits, decide_fleet
from culm.sim.compare_strategies import NodePrice, simulate_trace
from culm.sim.deadline_run import (
    DeadlineGoal,
    DeadlineOutcome,
    full_step_s,
    on_demand_only,
    simulate_deadline,
    spot_only,
)

HOUR = 3600.0
SPOT, ON_DEMAND = PriceSeries.constant(1.0), 3.0


def goal(work_h: float, deadline_h: float, budget: float = math.inf) -> DeadlineGoal:
    return DeadlineGoal(
        samples=work_h * HOUR / full_step_s(SCENE) * WORK.samples,
        limits=FleetLimits(deadline_s=deadline_h * HOUR, budget_usd=budget),
        horizon_s=2 * deadline_h * HOUR,
    )


def test_on_demand_alone_costs_its_price_for_the_time_of_the_work() -> None:
    found = simulate_deadline(SCENE, "reroute", trace(hours=20), SPOT, ON_DEMAND, goal(4, 10), on_demand_only)
    assert found.kept_both
    assert 4 * HOUR < found.seconds < 4.3 * HOUR  # starting up and checkpoints
    assert found.usd == pytest.approx(WORK.nodes * ON_DEMAND * found.seconds / HOUR)
    assert found.on_demand_share == pytest.approx(1.0)


def test_in_a_calm_market_all_is_spot() -> None:
    found = simulate_deadline(SCENE, "reroute", trace(hours=20), SPOT, ON_DEMAND, goal(4, 6))
    assert found.kept_both
    assert found.on_demand_share == 0.0
    assert found.usd == pytest.approx(WORK.nodes * 1.0 * found.seconds / HOUR)


def test_when_the_market_is_empty_on_demand_nodes_keep_the_deadline() -> None:
    """After an hour all spot nodes are lost for good."""
    gone = trace(*((1.0, "remove", n) for n in range(12)), hours=20)
    mixed = simulate_deadline(SCENE, "reroute", gone, SPOT, ON_DEMAND, goal(4, 8), decide_fleet)
    spot = simulate_deadline(SCENE, "reroute", gone, SPOT, ON_DEMAND, goal(4, 8), spot_only)
    assert mixed.kept_both
    assert not spot.kept_deadline
    assert spot.usd == pytest.approx(12 * 1.0)
    assert 0 < mixed.on_demand_share < 1


def test_a_budget_is_never_exceeded() -> None:
    for seed in range(5):
        market = generate_trace(MarketModel(nodes=12, hours=20, rate=0.5, available=0.6), seed)
        for policy in (decide_fleet, spot_only, on_demand_only):
            found = simulate_deadline(SCENE, "reroute", market, SPOT, ON_DEMAND, goal(6, 9, budget=90.0), policy)
            assert found.usd <= 90.0
            assert found.kept_budget == (found.samples == goal(6, 9).samples)


def test_the_mixed_fleet_keeps_more_deadlines_than_spot_and_costs_less_than_on_demand() -> None:
    outcomes: dict[str, list[DeadlineOutcome]] = {"mixed": [], "spot": [], "on demand": []}
    for seed in range(12):
        market = generate_trace(MarketModel(nodes=12, hours=20, rate=0.5, available=0.6), seed)
        for name, policy in zip(outcomes, (decide_fleet, spot_only, on_demand_only), strict=True):
            outcomes[name].append(simulate_deadline(SCENE, "reroute", market, SPOT, ON_DEMAND, goal(6, 9), policy))
    kept = {name: sum(each.kept_both for each in found) for name, found in outcomes.items()}
    usd = {name: sum(each.usd for each in found) / 12 for name, found in outcomes.items()}
    assert kept["mixed"] == kept["on demand"] == 12
    assert kept["spot"] < 9
    assert usd["spot"] < usd["mixed"] < 0.8 * usd["on demand"]


def test_prices_that_move_are_billed_from_when_they_move() -> None:
    series = PriceSeries((PriceMove(0.0, 1.0, "z0"), PriceMove(HOUR, 3.0, "z0"), PriceMove(HOUR, 9.0, "other")))
    run = simulate_trace(SCENE, "reroute", trace(hours=2.0), NodePrice(1.0, 3.0, series))
    assert run.usd == pytest.approx(12 * (1.0 + 3.0))
    assert run.points[-1].usd == run.usd


def test_the_command_prints_how_often_both_promises_held(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("simulate", "--deadline", "6h", "--budget", "$900", "--seeds", "3", "--strategy", "reroute", "--json")
    with pytest.raises(SystemExit) as ended:
        main((*asked, "--market", "rate=0.2", "--reconfigure", "never"))
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policies"].keys() == {"mixed", "spot only", "on-demand only"}
    assert (found["deadline_h"], found["budget_usd"]) == (6.0, 900.0)
    assert found["calm_hours"] == pytest.approx(4.0)
    assert all(row["markets"] == 3 for row in found["policies"].values())


def test_a_share_of_few_markets_has_a_wide_interval() -> None:
    assert wilson_interval(3, 3)[0] < 0.5
    assert wilson_interval(1000, 1000) == pytest.approx((0.99617, 1.0), abs=1e-4)
    assert wilson_interval(500, 1000) == pytest.approx((0.469, 0.531), abs=1e-3)
