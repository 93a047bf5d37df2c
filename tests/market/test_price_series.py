"""Prices that move, and markets out of parts of a trace."""

from __future__ import annotations

import random
from collections import Counter
from datetime import date
from importlib import resources

import pytest

from culm.errors import UsageError
from culm.market import MarketModel, generate_trace
from culm.market.market_trace import HOUR, MarketTrace, NodeEvent
from culm.market.price_series import PriceMove, PriceSeries, price_series, published_prices, weekly_volatility
from culm.market.trace_window import trace_window

CSV = """date,instance,zone,spot_usd_h
2024-01-01,p3.2xlarge,a,1.0
2024-01-15,p3.2xlarge,a,1.2
2024-01-29,p3.2xlarge,a,nan
2024-02-12,p3.2xlarge,a,0.9
2024-01-01,p3.2xlarge,b,2.0
2024-02-12,p3.2xlarge,b,2.5
2024-01-01,g5.xlarge,a,0.3
"""


def test_a_price_holds_until_the_next_one_in_its_zone() -> None:
    series = PriceSeries((PriceMove(0.0, 1.0, "a"), PriceMove(0.0, 5.0, "b"), PriceMove(10.0, 2.0, "a")))
    assert [series.at(t, "a") for t in (0.0, 9.9, 10.0, 99.0)] == [1.0, 1.0, 2.0, 2.0]
    assert series.at(99.0, "b") == 5.0
    assert series.at(99.0, "unknown") == 2.0
    assert PriceSeries.constant(3.0).at(7.0, "a") == 3.0


def test_published_prices_are_met_on_their_days_and_move_in_between() -> None:
    published = published_prices(CSV, "prices.csv", "p3.2xlarge")
    assert [day for day, _ in published["a"]] == [date(2024, 1, 1), date(2024, 1, 15), date(2024, 2, 12)]
    starts = [price_series(published, ["z1", "z2"], 20 * 24.0, seed) for seed in range(8)]
    first = next(each for each in starts if "2024-01-01" in each.source)
    zone_a = next(zone for zone in first.zones if first.at(0.0, zone) == 1.0)
    assert first.at(14 * 24 * HOUR, zone_a) == 1.2
    assert len({move.usd_h for move in first.moves}) > 20
    assert price_series(published, ["z1", "z2"], 20 * 24.0, 3) == starts[3]


def test_prices_without_changes_do_not_move() -> None:
    flat = published_prices(CSV.replace("1.2", "1.0").replace("0.9", "1.0"), "prices.csv", "p3.2xlarge")
    assert weekly_volatility({"a": flat["a"]}) == 0.0
    assert {move.usd_h for move in price_series({"a": flat["a"]}, ["z"], 100.0, 1).moves} == {1.0}


def test_the_package_has_prices_of_years() -> None:
    text = (resources.files("culm.market") / "data" / "zones.csv").read_text("utf-8")
    with pytest.raises(UsageError, match="has no prices of toaster over time"):
        published_prices(text, "zones.csv", "toaster")
    assert published_prices(text, "zones.csv", "c5n.2xlarge")


@pytest.mark.parametrize("seed", range(10))
def test_a_window_is_a_valid_trace_with_the_counts_of_the_trace(seed: int) -> None:
    """MarketTrace itself refuses events that are out of order or concern absent nodes."""
    trace = generate_trace(MarketModel(nodes=8, hours=5, rate=1.0, available=0.6), seed)
    start = random.Random(seed).uniform(0, trace.span_s)
    window = trace_window(trace, start, 12 * HOUR)

    def alive(market: MarketTrace, t: float) -> int:
        return sum(1 if event.kind == "add" else -1 for event in market.events if event.t <= t)

    for t in [random.Random(seed + 1).uniform(0, 12 * HOUR) for _ in range(20)]:
        assert alive(window, t) == alive(trace, (start + t) % trace.span_s)
    assert Counter(event.node for event in window.events if event.kind == "add").most_common(1)[0][1] == 1


def test_a_window_beyond_the_end_keeps_the_nodes_that_are_there() -> None:
    trace = MarketTrace((NodeEvent(0.0, "add", "a"), NodeEvent(0.0, "add", "b"), NodeEvent(50.0, "remove", "a")), 100.0)
    window = trace_window(trace, 60.0, 100.0)
    assert [(event.t, event.kind) for event in window.events] == [(0.0, "add"), (40.0, "add"), (90.0, "remove")]
    assert window.events[2].node == window.events[0].node  # the second round's first node is the one that stayed
