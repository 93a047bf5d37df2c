"""How many spot and on-demand nodes a run should have: the decision that real runs and the simulator share."""

from __future__ import annotations

import pytest

from culm.plan.rent.fleet_decision import (
    START_RESERVE_S,
    FleetHistory,
    FleetLimits,
    FleetProgress,
    NodeOffers,
    deadline_risk,
    decide_fleet,
    expected_pace,
    needed_pace,
)

OFFERS = NodeOffers(spot_usd_h=1.0, on_demand_usd_h=3.0)
HOUR = 3600.0


def progress(**fields: object) -> FleetProgress:
    """Sixteen nodes and ten hours of work with all of them."""
    known: dict[str, object] = {
        "elapsed_s": 0.0, "steps_done": 0, "steps": 1000, "nodes": 16, "full_step_s": 36.0, "spot_nodes": 16,
    }  # fmt: skip
    return FleetProgress(**{**known, **fields})  # type: ignore[arg-type]


def within(hours: float, **fields: object) -> FleetLimits:
    return FleetLimits(deadline_s=hours * HOUR, **fields)  # type: ignore[arg-type]


def test_spot_nodes_alone_while_they_are_fast_enough() -> None:
    decision = decide_fleet(progress(), within(15), OFFERS)
    assert (decision.spot, decision.on_demand, decision.stop) == (16, 0, False)
    assert "keep the deadline" in decision.why


def test_without_a_deadline_spot_nodes_alone_however_few_there_are() -> None:
    decision = decide_fleet(progress(spot_nodes=0, spot_shares=((0.0, 1.0),)), FleetLimits(), OFFERS)
    assert (decision.spot, decision.on_demand) == (16, 0)


def test_on_demand_nodes_work_while_spot_nodes_are_missing_and_not_beside_them() -> None:
    """All or nothing, half of the time each: a floor of f gives 1/2 + f/2 of full speed."""
    market = ((0.0, 0.5), (1.0, 0.5))
    limits = within(15)
    needed = needed_pace(progress(), limits)
    gone = decide_fleet(progress(spot_nodes=0, spot_shares=market), limits, OFFERS)
    there = decide_fleet(progress(spot_nodes=16, spot_shares=market), limits, OFFERS)
    assert 0.5 + gone.on_demand / 16 / 2 >= needed > 0.5 + (gone.on_demand - 1) / 16 / 2
    assert (there.spot, there.on_demand) == (16, 0)
    assert gone.spot + gone.on_demand == 16
    assert "would miss the deadline" in gone.why


def test_a_steady_lack_of_spot_nodes_is_filled_up() -> None:
    limits = within(11)
    decision = decide_fleet(progress(spot_nodes=12, spot_shares=((0.75, 1.0),)), limits, OFFERS)
    assert expected_pace(((0.75, 1.0),), (12 + decision.on_demand) / 16) >= needed_pace(progress(), limits)
    assert decision.on_demand == 4


def test_nodes_are_given_back_only_when_the_rest_is_faster_than_needed_by_a_margin() -> None:
    """The same market and deadline: with on-demand nodes they stay, without them none is rented."""
    shares, limits = ((0.8, 1.0),), within(13.9)
    assert 0.8 / 1.1 < needed_pace(progress(), limits) < 0.8
    none = decide_fleet(progress(spot_nodes=12, spot_shares=shares), limits, OFFERS)
    some = decide_fleet(progress(spot_nodes=12, spot_shares=shares, on_demand_nodes=2), limits, OFFERS)
    enough = decide_fleet(progress(spot_nodes=12, spot_shares=shares, on_demand_nodes=2), within(20), OFFERS)
    assert (none.on_demand, some.on_demand, enough.on_demand) == (0, 2, 0)


def test_at_the_last_moment_every_missing_node_is_rented_on_demand() -> None:
    hours = 10 * 1.05 + START_RESERVE_S / HOUR
    decision = decide_fleet(progress(spot_nodes=5), within(hours - 0.01), OFFERS)
    assert (decision.spot, decision.on_demand) == (5, 11)


def test_no_money_is_spent_on_a_deadline_that_is_lost() -> None:
    decision = decide_fleet(progress(spot_nodes=5, on_demand_nodes=11), within(9.9), OFFERS)
    assert (decision.spot, decision.on_demand, decision.stop) == (16, 0, False)
    assert "cannot be kept any more" in decision.why


def test_a_run_that_recovers_often_needs_more_nodes() -> None:
    market, limits = ((0.5, 1.0),), within(15)
    smooth = decide_fleet(progress(spot_nodes=8, spot_shares=market), limits, OFFERS)
    rough = decide_fleet(progress(spot_nodes=8, spot_shares=market, efficiency=0.9), limits, OFFERS)
    assert 0 < smooth.on_demand < rough.on_demand


def test_the_budget_ends_the_run_before_everything_else() -> None:
    spent = progress(cost_usd=90.0, cost_if_stopped_usd=100.0)
    decision = decide_fleet(spent, within(1, budget_usd=100.0), OFFERS)
    assert decision.stop
    assert "the budget of $100.00 is reached: $90.00 are spent" in decision.why


def test_the_budget_limits_on_demand_nodes_to_what_it_pays_until_the_end() -> None:
    gone = progress(spot_nodes=0, spot_shares=((0.0, 0.5), (1.0, 0.5)), cost_if_stopped_usd=100.0)
    rich, poor, broke = (decide_fleet(gone, within(15, budget_usd=100.0 + left), OFFERS) for left in (1e6, 220.0, 50.0))
    assert rich.on_demand > poor.on_demand > broke.on_demand == 0
    assert "are left of the budget pay for" in poor.why
    assert not broke.stop


@pytest.mark.parametrize(
    ("offers", "limit", "fleet", "why"),
    [
        (NodeOffers(spot_usd_h=4.0, on_demand_usd_h=3.0), 9.0, (0, 16), "spot costs"),
        (NodeOffers(spot_usd_h=None, on_demand_usd_h=3.0), 9.0, (0, 16), "there is no spot offer"),
        (NodeOffers(spot_usd_h=1.0, on_demand_usd_h=3.0), 2.0, (16, 0), "more than the highest price"),
        (NodeOffers(spot_usd_h=1.0, on_demand_usd_h=3.0), 0.5, (0, 0), "waits for lower prices"),
    ],
)
def test_offers_above_the_highest_price_are_not_used(
    offers: NodeOffers, limit: float, fleet: tuple[int, int], why: str
) -> None:
    decision = decide_fleet(progress(spot_nodes=0), within(12, max_price_usd_h=limit), offers)
    assert (decision.spot, decision.on_demand) == fleet
    assert why in decision.why


def test_the_share_of_spot_nodes_follows_the_market_and_forgets() -> None:
    history = FleetHistory(16, window_s=HOUR)
    history.update(0.0, 16, 0)
    history.update(HOUR, 0, 0)
    shares = dict(history.spot_shares(2 * HOUR))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares[0.0] == pytest.approx(1 - 2.718281828**-1)
    later = FleetHistory(16, window_s=HOUR)
    history.update(2 * HOUR, 4, 8)  # half of the wanted ones
    later.restore(history.state)
    assert later.spot_shares(0.0) == history.spot_shares(2 * HOUR)
    assert dict(history.spot_shares(20 * HOUR)) == pytest.approx({0.5: 1.0}, abs=1e-6)


def test_efficiency_is_useful_work_over_what_was_present() -> None:
    history = FleetHistory(16)
    history.update(0.0, 8, 0)
    assert history.efficiency(20 * HOUR, 8 * HOUR) == pytest.approx((8 * HOUR + 600) / (10 * HOUR + 600))
    assert FleetHistory(16).efficiency(0.0, 0.0) == 1.0


def test_a_deadline_is_at_risk_if_the_present_nodes_are_too_slow() -> None:
    assert deadline_risk(progress(spot_nodes=16), within(11)) is None
    assert "takes 20.0 h, and the deadline is 11.0 h" in (deadline_risk(progress(spot_nodes=8), within(11)) or "")
    assert deadline_risk(progress(spot_nodes=8), FleetLimits()) is None
