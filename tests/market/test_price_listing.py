"""Prices are filtered, compared per GPU, and marked where they are doubtful."""

from __future__ import annotations

from datetime import date

import pytest

from culm.errors import UsageError
from culm.market import load_catalogue
from culm.market.price_listing import PriceFilter, comparable_price, list_prices, price_marks, zones_of

TODAY = date(2026, 11, 18)


def names(**wanted: object) -> list[str]:
    return [machine.instance for machine in list_prices(load_catalogue(), PriceFilter(**wanted))]  # type: ignore[arg-type]


def test_the_cheapest_gpu_comes_first_and_instances_without_a_price_last() -> None:
    found = list_prices(load_catalogue(), PriceFilter(accelerator="H100"))
    per_gpu = [machine.per_gpu(comparable_price(machine)) for machine in found]
    assert per_gpu[-1] is None
    priced = [price for price in per_gpu if price is not None]
    assert len(priced) == len(found) - 1
    assert priced == sorted(priced)


def test_filters_are_combined() -> None:
    assert names(cloud="aws", accelerator="a100") == ["p4d.24xlarge", "p4de.24xlarge"]
    assert names(instance="p5*", max_usd_h=21) == ["p5.48xlarge", "p5.4xlarge"]
    assert names(instance="nd96isr_h200") == ["Standard_ND96isr_H200_v5"]


def test_a_region_restricts_the_spot_prices_to_its_zones() -> None:
    (found,) = list_prices(load_catalogue(), PriceFilter(instance="p5en", zone="us-east-2"))
    assert set(found.zone_prices) == {"use2-az1", "use2-az2", "use2-az3"}
    assert found.spot_min_usd_h == min(found.zone_prices.values())
    (zone,) = list_prices(load_catalogue(), PriceFilter(instance="p5en", zone="use2-az1"))
    assert zone.spot_usd_h == zone.zone_prices["use2-az1"] == 26.4108


def test_regions_are_found_by_name_and_zone_id() -> None:
    known = ["use1-az1", "use1-az2", "use2-az1", "us-central1-a", "eastus", "eastus2", "apne1-az4"]
    assert zones_of("us-east-1", known) == ["use1-az1", "use1-az2"]
    assert zones_of("ap-northeast-1", known) == ["apne1-az4"]
    assert zones_of("us-central1", known) == ["us-central1-a"]
    assert zones_of("eastus", known) == ["eastus"]


def test_prices_of_a_day_omit_instances_that_had_none() -> None:
    found = list_prices(load_catalogue(), PriceFilter(cloud="aws", accelerator="V100"), on=date(2022, 6, 30))
    assert [machine.instance for machine in found] == ["p3.2xlarge"]


@pytest.mark.parametrize(
    ("instance", "marks"),
    [
        ("p5.48xlarge", ()),
        ("Standard_NC6s_v3", ("old",)),
        ("Standard_ND96isr_H100_v5", ("old", "spot = on demand")),
        ("p6-b300.48xlarge", ("no spot price",)),
        ("p5e.48xlarge", ("no price",)),
    ],
)
def test_doubtful_prices_are_marked(instance: str, marks: tuple[str, ...]) -> None:
    assert price_marks(load_catalogue().find(instance), TODAY) == marks


def test_a_filter_that_matches_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no instance matches --cloud aws --accelerator TPU: 'culm prices' lists all"):
        names(cloud="aws", accelerator="TPU")
    with pytest.raises(UsageError, match=r"--instance p5\.48xlrge: did you mean p5\.48xlarge or "):
        names(instance="p5.48xlrge")
