"""Dated prices, the bill of a run, and its value."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import UsageError
from culm.gnn.price import PRICES, bill, prices_of, value

CATALOGUE = Path(__file__).parents[2] / "../shared/traces/cloud-prices/catalogue-us-2026-08.csv"
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
    assert bill(prices_of("2021"), instance=instance, server_s=servers * seconds).usd == pytest.approx(usd, rel=0.03)


def test_the_fee_of_a_request_doubles_the_price_of_a_call_of_ten_milliseconds() -> None:
    made = bill(prices_of(), instance="c5n.2xlarge", server_s=0, worker_gb_s=1.2 * 0.010, requests=1)
    assert made.requests_usd == pytest.approx(made.workers_usd, rel=0.01)


@given(amounts, amounts, amounts)
def test_a_bill_is_the_sum_of_its_parts_and_grows_with_each(server_s: float, gb_s: float, requests: float) -> None:
    made = bill(prices_of(), instance="c5n.2xlarge", server_s=server_s, worker_gb_s=gb_s, requests=requests)
    assert made.usd == made.servers_usd + made.workers_usd + made.requests_usd
    more = bill(prices_of(), instance="c5n.2xlarge", server_s=server_s + 1, worker_gb_s=gb_s, requests=requests)
    assert more.servers_usd > made.servers_usd
    assert more.workers_usd == made.workers_usd


def test_value_counts_time_and_money_alike() -> None:
    assert value(2.0, 5.0) == 0.1
    assert value(1.0, 10.0) == value(10.0, 1.0)


@pytest.mark.parametrize(("seconds", "usd"), [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_value_needs_time_and_cost(seconds: float, usd: float) -> None:
    with pytest.raises(UsageError, match="above 0"):
        value(seconds, usd)


def test_spot_costs_less_and_only_where_a_price_is_known() -> None:
    hour = {"instance": "c5n.2xlarge", "server_s": 3600.0}
    assert bill(prices_of(), **hour, spot=True).usd < bill(prices_of(), **hour).usd  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no spot price of c5\.2xlarge"):
        bill(prices_of(), instance="c5.2xlarge", server_s=1, spot=True)


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean c5n\.2xlarge\?"):
        prices_of().machine("c5n.2xlrge")
    with pytest.raises(UsageError, match="there is 2021, 2026"):
        prices_of("1999")


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_an_amount_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(UsageError, match="server_s"):
        bill(prices_of(), instance="c5n.2xlarge", server_s=wrong)


@pytest.mark.skipif(not CATALOGUE.is_file(), reason="the price catalogue is not beside this checkout")
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
