"""A generated market has the numbers that were asked for, and can be fitted to a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import UsageError
from culm.market import Market, Trace, generate, read_trace, statistics
from culm.market.chart import Panel, bars, means, svg
from culm.market.fit import fit, sample

SHARED = Path(__file__).parents[2] / "../shared/traces"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")


def test_the_same_seed_gives_the_same_trace() -> None:
    assert generate(Market(), 3) == generate(Market(), 3)
    assert generate(Market(), 3) != generate(Market(), 4)


def test_rate_group_and_share_alive_are_as_asked_for() -> None:
    found = sample(Market(nodes=60, hours=48, rate=0.3, group=2.1, zones=3, available=0.8, tail=1.0), range(6))
    assert found.rate == pytest.approx(0.3, rel=0.08)
    assert found.group == pytest.approx(2.1, rel=0.08)
    assert found.fraction == pytest.approx(0.8, rel=0.05)


def test_a_lower_shape_gives_shorter_median_lives_at_the_same_rate() -> None:
    heavy, light = (sample(Market(nodes=60, hours=48, rate=0.3, tail=tail), range(4)) for tail in (0.5, 1.0))
    assert heavy.life_h < 0.7 * light.life_h


def test_a_group_is_lost_within_one_zone() -> None:
    trace = generate(Market(nodes=60, rate=0.5, group=4), 0)
    moments: dict[float, set[str]] = {}
    for event in trace.events:
        if event.kind == "remove":
            moments.setdefault(event.t, set()).add(event.zone)
    assert len(moments) > 20
    assert all(len(zones) == 1 for zones in moments.values())
    assert trace.zones == ("zone1", "zone2", "zone3")


def test_nobody_is_lost_at_rate_zero() -> None:
    assert statistics(generate(Market(rate=0, available=1), 0)).removes == 0


@given(st.integers(1, 30), st.floats(0, 3), st.floats(1, 9), st.integers(1, 4), st.floats(0.05, 1), st.floats(0.3, 2.0))
def test_a_generated_trace_is_one_that_could_have_happened(
    nodes: int, rate: float, group: float, zones: int, available: float, tail: float
) -> None:
    market = Market(nodes=nodes, hours=4, rate=rate, group=group, zones=zones, available=available, tail=tail)
    trace = generate(market, 1)
    assert Trace(trace.events, trace.span_s).peak <= nodes


@shared
@pytest.mark.parametrize("name", ["bamboo/p3-trace.csv", "bamboo/g4dn-trace.csv"])
def test_a_fitted_market_is_like_its_trace_on_other_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many losses a round show it."""
    monkeypatch.setattr("culm.market.fit.LOSSES", 2000)
    found = fit(read_trace(SHARED / name))
    for number in ("rate", "group", "life_h", "fraction"):
        assert getattr(found.generated, number) == pytest.approx(getattr(found.given, number), rel=0.12), number


def test_a_fit_finds_the_numbers_of_the_market_that_it_came_from() -> None:
    market = Market(nodes=24, hours=8, rate=0.4, group=3.0, zones=2, available=0.8, tail=0.6)
    found = fit(generate(market, 5))
    assert found.market.zones == 2
    assert found.generated.group == pytest.approx(found.given.group, rel=0.15)
    assert found.generated.rate == pytest.approx(found.given.rate, rel=0.15)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rats=1", "did you mean rate"),
        ("rate=fast", "rate is a number"),
        ("zones=1.5", "zones is a whole number"),
        ("rate=-1", "market rate is -1: use 0 to 100"),
        ("available=2", "market available is 2: use 0.01 to 1"),
    ],
)
def test_a_market_that_can_not_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Market.parse(text)


def test_a_market_is_parsed() -> None:
    assert Market.parse("rate=0.2,zones=2, nodes=9") == Market(rate=0.2, zones=2, nodes=9)


def test_a_column_of_a_picture_is_the_mean_over_its_time() -> None:
    assert means([(0, 4), (1, 2)], 4, 2) == [3, 2]
    assert means([(0, 4)], 4, 4) == [4, 4, 4, 4]


def test_pictures_name_what_they_show() -> None:
    drawn = svg("p3 <trace>", [Panel("nodes", {"alive": [(0, 1), (1, 3)]})], 2)
    assert "p3 &lt;trace&gt;" in drawn
    assert "alive" in drawn
    assert bars([(0, 1), (1, 3)], 2, width=10, height=4).startswith("       3 ")
