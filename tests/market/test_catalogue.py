"""Prices have dates, a name that is not there has a nearest one, and a user's own prices win."""

from __future__ import annotations

from pathlib import Path

import pytest

from culm.errors import UsageError
from culm.market import catalogue


def test_the_newest_price_is_found_and_dated() -> None:
    found = catalogue().find("g4dn.xlarge")
    assert (found.gpu, found.gpu_count, found.on_demand_usd_h, found.spot_usd_h) == ("T4", 1, 0.526, 0.2289)
    assert str(found.as_of) == "2026-08-22"
    assert found.notice_s == 120


def test_the_price_of_a_day_is_the_last_one_before_it() -> None:
    assert catalogue().find("p3.2xlarge", on="2022-06-30").spot_usd_h == 0.918
    assert catalogue().find("p3.2xlarge").spot_usd_h == 0.3789
    past = catalogue().find("g4dn.xlarge", on="2022-12-31")
    assert (str(past.as_of), past.spot_usd_h) == ("2022-12-11", 0.1578)
    assert past.gpu_mem_gib == 16


def test_a_day_before_the_first_price_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no price of p3\.2xlarge on 2020-01-01: the first is of 2022-01-01"):
        catalogue().find("p3.2xlarge", on="2020-01-01")


def test_prices_by_zone_differ_and_an_unknown_zone_is_refused() -> None:
    machine = catalogue().find("g4dn.xlarge")
    assert machine.price(zone="use2-az1") == 0.1858
    assert machine.price(spot=False) == 0.526
    with pytest.raises(UsageError, match="zone 'mars-az1' is not known: known are use1-az1, "):
        machine.price(zone="mars-az1")


def test_all_three_clouds_are_there() -> None:
    assert {machine.cloud for machine in catalogue().machines} == {"aws", "gcp", "azure"}


@pytest.mark.parametrize(("typed", "meant"), [("g5.xlrage", "g5.xlarge"), ("P3.2XLARGES", "p3.2xlarge")])
def test_an_unknown_instance_gets_the_nearest_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"no instance '{typed}' in the catalogue: did you mean {meant}"):
        catalogue().find(typed)


def test_a_name_is_found_whatever_its_case() -> None:
    assert catalogue().find("standard_nc6s_v3").instance == "Standard_NC6s_v3"


def prices(folder: Path, text: str) -> Path:
    path = folder / "mine.csv"
    path.write_text(text)
    return path


def test_a_users_prices_replace_those_of_the_instances_they_name(tmp_path: Path) -> None:
    path = prices(tmp_path, "instance,on_demand_usd_h,spot_usd_h\ng5.xlarge,1.0,0.2\n")
    own = catalogue(path)
    assert own.find("g5.xlarge").spot_usd_h == 0.2
    assert own.find("g5.xlarge").gpu == "A10G"
    assert own.find("g4dn.xlarge") == catalogue().find("g4dn.xlarge")


def test_rows_of_several_zones_are_one_machine(tmp_path: Path) -> None:
    text = "instance,zone,on_demand_usd_h,spot_usd_h\ng5.xlarge,a,1,0.2\ng5.xlarge,b,1,0.4\ng5.xlarge,c,1,0.9\n"
    found = catalogue(prices(tmp_path, text)).find("g5.xlarge")
    assert (found.spot_min_usd_h, found.spot_usd_h, found.spot_max_usd_h) == (0.2, 0.4, 0.9)
    assert found.price(zone="c") == 0.9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("instance,spot_usd_h\n", "line 1, has no column 'on_demand_usd_h'"),
        ("instance,on_demand_usd_h,spot_usd_h\n\ng5.xlarge,1,-2\n", "line 3, has spot_usd_h '-2': use a number"),
        ("instance,on_demand_usd_h,spot_usd_h\ng5.xlarge,1,cheap\n", "line 2, has spot_usd_h 'cheap'"),
        ("instance,on_demand_usd_h,spot_usd_h\ng5.xlarge,1\n", "line 2, has 2 cells: the header names 3"),
        ("instance,on_demand_usd_h,spot_usd_h\nx9.huge,1,1\n", "'x9.huge', which the catalogue does not know"),
        ("instance,on_demand_usd_h,spot_usd_h,as_of\ng5.xlarge,1,1,soon\n", "has as_of 'soon': write a date"),
    ],
)
def test_a_bad_row_is_pointed_at(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        catalogue(prices(tmp_path, text))


def test_a_file_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"could not be read: No such file"):
        catalogue(tmp_path / "none.csv")
