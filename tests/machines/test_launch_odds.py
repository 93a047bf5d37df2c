"""The odds of a launch before it is started: how often its limits are kept in simulated markets."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from tests import tiny_jobs

from culm.cli.launching.launch_odds import LaunchOdds, find_odds
from culm.config import RunConfig
from culm.errors import UsageError
from culm.machines.launch_order import LaunchOrder
from culm.machines.machine_provider import MachineRequest, Market
from culm.plan.model.model_profile import LayerCost, Profile

HOUR = 3600.0
STEPS = 2000


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Three seconds for each half of a layer: 2,000 steps take about 20 hours on four machines."""
    layer = LayerCost(
        name="block",
        forward_s=3.0,
        input_s=3.0,
        weight_s=3.0,
        parameter_bytes=10**6,
        state_bytes=3 * 10**6,
        activation_bytes=10**5,
        output_bytes=10**4,
    )
    path = tmp_path / "profile.json"
    Profile(layers=(layer,) * 4, device="test", micro_batch=2, threads=1, source="measured").save(path)
    return str(path)


def odds(
    profile: str,
    prices: dict[Market, float],
    *,
    deadline: float | None = None,
    budget: float | None = None,
    trace: str = "",
) -> LaunchOdds:
    requests = tuple(MachineRequest(count=1, market=market) for market in prices)
    options = {"trace": trace} if trace else {}
    order = LaunchOrder(launch="tiny-1", job="tiny", provider="hosts", requests=requests, options=options)
    config = RunConfig(
        nodes=4,
        profile=profile,
        out="s3://bucket/a",
        preemption_rate=0.5,
        strategy="reroute",
        deadline=deadline,
        budget=budget,
    )
    return find_odds(partial(tiny_jobs.job, steps=STEPS), config, order, 4, prices, markets=5)


def test_on_demand_machines_keep_what_the_speed_and_the_price_allow(profile: str) -> None:
    found = odds(profile, {"on-demand": 1.0}, deadline=1000 * HOUR, budget=1000.0)
    (outcome,) = found.outcomes
    assert outcome.kept_both
    assert outcome.usd == pytest.approx(4 * outcome.seconds / HOUR, rel=0.01)
    short = odds(profile, {"on-demand": 1.0}, deadline=0.9 * outcome.seconds, budget=1000.0).outcomes[0]
    assert (short.kept_deadline, short.kept_budget) == (False, True)
    poor = odds(profile, {"on-demand": 1.0}, deadline=1000 * HOUR, budget=0.9 * outcome.usd).outcomes[0]
    assert not poor.kept_budget


def test_a_deadline_that_spot_machines_alone_miss_is_kept_with_on_demand_machines(profile: str) -> None:
    calm_s = odds(profile, {"on-demand": 1.0}, deadline=1000 * HOUR).outcomes[0].seconds
    spot = odds(profile, {"spot": 0.3}, deadline=1.05 * calm_s)
    mixed = odds(profile, {"spot": 0.3, "on-demand": 1.0}, deadline=1.3 * calm_s)
    assert not all(each.kept_deadline for each in spot.outcomes)
    assert all(each.kept_deadline for each in mixed.outcomes)
    assert "the deadline of" in mixed.sentence() and "kept in 100%" in mixed.sentence()
    assert "50% of the spot machines are lost per hour" in mixed.sentence()


def test_a_market_trace_is_the_market_of_its_launch(profile: str, tmp_path: Path) -> None:
    """Nobody can train on machines that the trace never has."""
    trace = tmp_path / "market.csv"
    trace.write_text("t_s,kind,node,zone\n0,add,a,z\n36000,remove,a,z\n")
    found = odds(profile, {"spot": 0.3}, deadline=20 * HOUR, trace=str(trace))
    assert str(trace.name) in found.sentence()
    assert not any(each.kept_deadline for each in found.outcomes)


def test_without_a_speed_or_a_price_the_odds_are_not_known(profile: str) -> None:
    with pytest.raises(UsageError, match="no price of these machines is known: give it with --price"):
        odds(profile, {}, deadline=HOUR)
    config = RunConfig(nodes=4, deadline=HOUR)
    order = LaunchOrder(launch="tiny-1", job="tiny", provider="hosts", requests=(MachineRequest(count=1),))
    with pytest.raises(UsageError, match="measure the job on such a machine with culm profile"):
        find_odds(tiny_jobs.job, config, order, 4, {"on-demand": 1.0})
