"""A generated market trace has the requested statistics, and a market can be fitted to a trace."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import UsageError
from culm.market import MarketModel, MarketTrace, compute_statistics, generate_trace, read_trace
from culm.market.chart import ChartPanel, column_means, draw_svg, draw_text_chart
from culm.market.market_fit import fit_market, sample_statistics
from culm.market.trace_statistics import mean_node_count
from culm.plan.rent.strategy_goodput import PreemptionRisk

SHARED = Path(__file__).parents[2] / "../shared/traces"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the published traces are not here")


def test_the_same_seed_gives_the_same_trace() -> None:
    assert generate_trace(MarketModel(), 3) == generate_trace(MarketModel(), 3)
    assert generate_trace(MarketModel(), 3) != generate_trace(MarketModel(), 4)


def test_rate_group_and_share_alive_are_as_requested() -> None:
    result = sample_statistics(
        MarketModel(nodes=60, hours=48, rate=0.3, group=2.1, zones=3, available=0.8, tail=1.0), range(6)
    )
    assert result.rate == pytest.approx(0.3, rel=0.08)
    assert result.group == pytest.approx(2.1, rel=0.08)
    assert result.fraction == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5])
def test_without_a_share_a_market_has_as_many_nodes_as_a_plan_expects_of_its_rate(rate: float) -> None:
    market, expected = MarketModel(rate=rate), 48 - PreemptionRisk(preemption_rate=rate).mean_missing_nodes(48)
    assert 48 * market.present_share == pytest.approx(expected)
    if rate == 0.1:
        assert expected == pytest.approx(46, abs=0.1), "as Bamboo's authors report"
    made = [mean_node_count(generate_trace(market, seed)) for seed in range(20)]
    assert fmean(made) == pytest.approx(expected, rel=0.03)


def test_a_lower_shape_gives_shorter_median_lives_at_the_same_rate() -> None:
    heavy, light = (
        sample_statistics(MarketModel(nodes=60, hours=48, rate=0.3, tail=tail), range(4)) for tail in (0.5, 1.0)
    )
    assert heavy.life_h < 0.7 * light.life_h


def test_a_group_is_lost_within_one_zone() -> None:
    trace = generate_trace(MarketModel(nodes=60, rate=0.5, group=4), 0)
    moments: dict[float, set[str]] = {}
    for event in trace.events:
        if event.kind == "remove":
            moments.setdefault(event.t, set()).add(event.zone)
    assert len(moments) > 20
    assert all(len(zones) == 1 for zones in moments.values())
    assert trace.zones == ("zone1", "zone2", "zone3")


def test_no_node_is_lost_at_rate_zero() -> None:
    assert compute_statistics(generate_trace(MarketModel(rate=0), 0)).removes == 0


@given(st.integers(1, 30), st.floats(0, 3), st.floats(1, 9), st.integers(1, 4), st.floats(0.05, 1), st.floats(0.3, 2.0))
def test_a_generated_trace_is_valid(
    nodes: int, rate: float, group: float, zones: int, available: float, tail: float
) -> None:
    market = MarketModel(nodes=nodes, hours=4, rate=rate, group=group, zones=zones, available=available, tail=tail)
    trace = generate_trace(market, 1)
    assert MarketTrace(trace.events, trace.span_s).peak <= nodes


@shared
@pytest.mark.parametrize("name", ["bamboo/p3-trace.csv", "bamboo/g4dn-trace.csv"])
def test_a_fitted_market_is_like_its_trace_on_other_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many losses per round are enough to show it."""
    monkeypatch.setattr("culm.market.market_fit.PREEMPTIONS_PER_ROUND", 2000)
    result = fit_market(read_trace(SHARED / name))
    for number in ("rate", "group", "life_h", "fraction"):
        assert getattr(result.achieved, number) == pytest.approx(getattr(result.target, number), rel=0.12), number


def test_a_fit_recovers_the_parameters_of_the_generating_market() -> None:
    market = MarketModel(nodes=24, hours=8, rate=0.4, group=3.0, zones=2, available=0.8, tail=0.6)
    result = fit_market(generate_trace(market, 5))
    assert result.market.zones == 2
    assert result.achieved.group == pytest.approx(result.target.group, rel=0.15)
    assert result.achieved.rate == pytest.approx(result.target.rate, rel=0.15)


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
def test_an_invalid_market_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        MarketModel.parse(text)


def test_a_market_is_parsed() -> None:
    assert MarketModel.parse("rate=0.2,zones=2, nodes=9") == MarketModel(rate=0.2, zones=2, nodes=9)


def test_a_column_of_a_picture_is_the_mean_over_its_time() -> None:
    assert column_means([(0, 4), (1, 2)], 4, 2) == [3, 2]
    assert column_means([(0, 4)], 4, 4) == [4, 4, 4, 4]


def test_charts_have_labels() -> None:
    drawn = draw_svg("p3 <trace>", [ChartPanel("nodes", {"alive": [(0, 1), (1, 3)]})], 2)
    assert "p3 &lt;trace&gt;" in drawn
    assert "alive" in drawn
    assert draw_text_chart([(0, 1), (1, 3)], 2, width=10, height=4).startswith("       3 ")
