"""Dated prices, the bill of a run, and its value."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import UsageError
from culm.gnn.plan.gnn_prices import PRICES, compute_bill, prices_for_year, value

CATALOGUE = Path(__file__).parents[3] / "../shared/traces/cloud-prices/catalogue-us-2026-08.csv"
amounts = st.floats(min_value=0, max_value=1e9)


@pytest.mark.parametrize(
    ("instance", "servers", "seconds", "usd"),
    [
        ("c5.2xlarge", 2, 1005, 0.19),
        ("p3.2xlarge", 2, 163, 0.28),
        ("c5n.2xlarge", 8, 710, 0.68),
        ("p3.2xlarge", 8, 385, 2.62),
        ("c5n.4xlarge", 32, 1991, 15.3),
        ("p3.2xlarge", 32, 1490, 40.5),
        ("c5n.2xlarge", 12, 2093, 3.01),
        ("p3.2xlarge", 12, 1039, 10.60),
    ],
)
def test_the_prices_of_2021_give_the_costs_that_the_paper_prints(
    instance: str, servers: int, seconds: float, usd: float
) -> None:
    assert compute_bill(prices_for_year("2021"), instance=instance, server_s=servers * seconds).usd == pytest.approx(
        usd, rel=0.03
    )


def test_the_request_fee_doubles_the_price_of_a_ten_millisecond_call() -> None:
    bill = compute_bill(prices_for_year(), instance="c5n.2xlarge", server_s=0, worker_gb_s=1.2 * 0.010, requests=1)
    assert bill.requests_usd == pytest.approx(bill.workers_usd, rel=0.01)


@given(amounts, amounts, amounts)
def test_a_bill_is_the_sum_of_its_parts_and_grows_with_each(server_s: float, gb_s: float, requests: float) -> None:
    bill = compute_bill(
        prices_for_year(), instance="c5n.2xlarge", server_s=server_s, worker_gb_s=gb_s, requests=requests
    )
    assert bill.usd == bill.servers_usd + bill.workers_usd + bill.requests_usd
    larger = compute_bill(
        prices_for_year(), instance="c5n.2xlarge", server_s=server_s + 1, worker_gb_s=gb_s, requests=requests
    )
    assert larger.servers_usd > bill.servers_usd
    assert larger.workers_usd == bill.workers_usd


def test_value_weighs_time_and_cost_equally() -> None:
    assert value(2.0, 5.0) == 0.1
    assert value(1.0, 10.0) == value(10.0, 1.0)


@pytest.mark.parametrize(("seconds", "usd"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_value_needs_time_and_cost(seconds: float, usd: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        value(seconds, usd)


def test_spot_costs_less_and_only_where_a_price_is_known() -> None:
    hour = {"instance": "c5n.2xlarge", "server_s": 3600.0}
    assert compute_bill(prices_for_year(), **hour, spot=True).usd < compute_bill(prices_for_year(), **hour).usd  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no spot price of c5\.2xlarge"):
        compute_bill(prices_for_year(), instance="c5.2xlarge", server_s=1, spot=True)


def test_unknown_names_suggest_the_closest() -> None:
    with pytest.raises(UsageError, match=r"did you mean c5n\.2xlarge\?"):
        prices_for_year().machine("c5n.2xlrge")
    with pytest.raises(UsageError, match="use 2021, 2026"):
        prices_for_year("1999")


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_an_invalid_amount_is_rejected(wrong: float) -> None:
    with pytest.raises(UsageError, match="server_s"):
        compute_bill(prices_for_year(), instance="c5n.2xlarge", server_s=wrong)


@pytest.mark.skipif(not CATALOGUE.is_file(), reason="the price catalogue is not available")
def test_the_prices_of_2026_are_those_of_the_catalogue() -> None:
    with CATALOGUE.open() as file:
        rows = {row["instance"]: row for row in csv.DictReader(file)}
    listed = [machine for name, machine in PRICES["2026"].machines.items() if name in rows]
    assert len(listed) >= 9
    for machine in listed:
        row = rows[machine.instance]
        assert machine.usd_h == float(row["on_demand_usd_h"])
        assert machine.spot_usd_h == float(row["spot_median_usd_h"])
        assert (machine.vcpus, machine.gpus, machine.gpu_gib) == (
            int(row["vcpus"]), int(row["gpu_count"]), float(row["gpu_mem_gib"])
        )  # fmt: skip
