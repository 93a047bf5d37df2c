"""Prices have dates, errors name the nearest known instance, and a user's own prices take precedence."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from culm.errors import UsageError
from culm.market import load_catalogue


def test_the_newest_price_is_found_and_dated() -> None:
    result = load_catalogue().find("g4dn.xlarge")
    assert (result.gpu, result.gpu_count, result.on_demand_usd_h, result.spot_usd_h) == ("T4", 1, 0.526, 0.2289)
    assert str(result.as_of) == "2026-08-22"
    assert result.notice_s == 120


def test_the_price_of_a_day_is_the_last_one_before_it() -> None:
    assert load_catalogue().find("p3.2xlarge", on="2022-06-30").spot_usd_h == 0.918
    assert load_catalogue().find("p3.2xlarge").spot_usd_h == 0.3789
    past = load_catalogue().find("g4dn.xlarge", on="2022-12-31")
    assert (str(past.as_of), past.spot_usd_h) == ("2022-12-11", 0.1578)
    assert past.gpu_mem_gib == 16


def test_a_day_before_the_first_price_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no price of p3\.2xlarge on 2020-01-01: the first is from 2022-01-01"):
        load_catalogue().find("p3.2xlarge", on="2020-01-01")


def test_prices_by_zone_differ_and_an_unknown_zone_is_refused() -> None:
    machine = load_catalogue().find("g4dn.xlarge")
    assert machine.price(zone="use2-az1") == 0.1858
    assert machine.price(spot=False) == 0.526
    with pytest.raises(UsageError, match="zone 'mars-az1' is not known: the known ones are use1-az1, "):
        machine.price(zone="mars-az1")


def test_the_catalogue_has_all_three_clouds() -> None:
    assert {machine.cloud for machine in load_catalogue().instances} == {"aws", "gcp", "azure"}


@pytest.mark.parametrize(("typed", "meant"), [("g5.xlrage", "g5.xlarge"), ("P3.2XLARGES", "p3.2xlarge")])
def test_an_unknown_instance_gets_the_nearest_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"no instance '{typed}' in the catalogue: did you mean {meant}"):
        load_catalogue().find(typed)


def test_a_name_is_found_whatever_its_case() -> None:
    assert load_catalogue().find("standard_nc6s_v3").instance == "Standard_NC6s_v3"


def prices(folder: Path, text: str) -> Path:
    path = folder / "mine.csv"
    path.write_text(text)
    return path


def test_a_users_prices_replace_those_of_the_instances_they_name(tmp_path: Path) -> None:
    path = prices(tmp_path, "instance,on_demand_usd_h,spot_usd_h\ng5.xlarge,1.0,0.2\n")
    own = load_catalogue(path)
    assert own.find("g5.xlarge").spot_usd_h == 0.2
    assert own.find("g5.xlarge").gpu == "A10G"
    assert own.find("g4dn.xlarge") == load_catalogue().find("g4dn.xlarge")


def test_rows_of_several_zones_are_one_machine(tmp_path: Path) -> None:
    text = "instance,zone,on_demand_usd_h,spot_usd_h\ng5.xlarge,a,1,0.2\ng5.xlarge,b,1,0.4\ng5.xlarge,c,1,0.9\n"
    result = load_catalogue(prices(tmp_path, text)).find("g5.xlarge")
    assert (result.spot_min_usd_h, result.spot_usd_h, result.spot_max_usd_h) == (0.2, 0.4, 0.9)
    assert result.price(zone="c") == 0.9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("instance,spot_usd_h\n", "line 1, has no column 'on_demand_usd_h'"),
        ("instance,on_demand_usd_h,spot_usd_h\n\ng5.xlarge,1,-2\n", "line 3, has spot_usd_h '-2': use a number"),
        ("instance,on_demand_usd_h,spot_usd_h\ng5.xlarge,1,cheap\n", "line 2, has spot_usd_h 'cheap'"),
        ("instance,on_demand_usd_h,spot_usd_h\ng5.xlarge,1\n", "line 2, has 2 cells: the header names 3"),
        ("instance,on_demand_usd_h,spot_usd_h\nx9.huge,1,1\n", "'x9.huge', which is not in the catalogue"),
        ("instance,on_demand_usd_h,spot_usd_h,as_of\ng5.xlarge,1,1,soon\n", "has as_of 'soon': write a date"),
    ],
)
def test_an_invalid_row_is_named_by_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        load_catalogue(prices(tmp_path, text))


def test_a_missing_file_gives_a_one_sentence_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"could not be read: No such file"):
        load_catalogue(tmp_path / "none.csv")


def test_every_row_has_a_source_and_every_price_a_date() -> None:
    for machine in load_catalogue().instances:
        assert machine.source
        assert machine.as_of is not None or (machine.spot_usd_h is None and machine.on_demand_usd_h is None)


@pytest.mark.parametrize(
    ("instance", "gpu", "count"),
    [
        ("p5e.48xlarge", "H200", 8),
        ("p6-b300.48xlarge", "B300", 8),
        ("p6e-gb200.36xlarge", "GB200", 4),
        ("g6e.48xlarge", "L40S", 8),
        ("a3-megagpu-8g", "H100", 8),
        ("a4-highgpu-8g", "B200", 8),
        ("Standard_ND96isr_H200_v5", "H200", 8),
    ],
)
def test_recent_instances_are_listed(instance: str, gpu: str, count: int) -> None:
    found = load_catalogue().find(instance)
    assert (found.gpu, found.gpu_count) == (gpu, count)


def test_a_price_that_is_not_known_is_refused_and_never_zero() -> None:
    bare, on_demand_only = (load_catalogue().find(name) for name in ("p5e.48xlarge", "p6-b300.48xlarge"))
    assert bare.discount is bare.zone_spread is bare.per_gpu(bare.spot_usd_h) is None
    for spot in (True, False):
        with pytest.raises(UsageError, match=r"price of p5e\.48xlarge is not known: give it with --prices CSV$"):
            bare.price(spot=spot)
    assert on_demand_only.price(spot=False) == 142.416
    with pytest.raises(UsageError, match=r"spot price .* is not known: .*; its on-demand price is 142\.416"):
        on_demand_only.price()


def test_a_price_is_old_after_120_days() -> None:
    machine = load_catalogue().find("g5.xlarge")
    assert machine.price_warnings(date(2026, 12, 20)) == ()
    (found,) = machine.price_warnings(date(2026, 12, 21))
    assert found.startswith("the price of g5.xlarge is 121 days old (2026-08-22, SkyPilot catalogue): update it with")


def test_a_spot_price_that_equals_the_on_demand_price_is_doubted_only_where_it_is_used() -> None:
    machine = load_catalogue().find("Standard_NC40ads_H100_v5")
    (found,) = machine.price_warnings(date(2025, 10, 1))
    assert "equals its on-demand price (6.98 $/h" in found
    assert machine.price_warnings(date(2025, 10, 1), spot=False) == ()


def test_a_users_row_may_have_a_source_a_date_and_no_spot_price(tmp_path: Path) -> None:
    text = "instance,on_demand_usd_h,spot_usd_h,date,source\np5e.48xlarge,70,,2026-11-01,my contract\n"
    found = load_catalogue(prices(tmp_path, text)).find("p5e.48xlarge")
    assert (found.on_demand_usd_h, found.spot_usd_h, str(found.as_of)) == (70, None, "2026-11-01")
    assert found.source == "my contract"


def test_a_users_row_may_have_the_range_over_its_zones(tmp_path: Path) -> None:
    text = "instance,on_demand_usd_h,spot_usd_h,spot_min_usd_h,spot_max_usd_h\ng5.xlarge,1,0.4,0.2,0.8\n"
    assert load_catalogue(prices(tmp_path, text)).find("g5.xlarge").zone_spread == 4
