"""Which fleets answer the question what to rent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from culm.plan.rent.fleet_search import Fleet, FleetAnswer, FleetGoal


def fleet(usd: float, hours: float, *, is_old: bool = False) -> Fleet:
    stand_in: Any = SimpleNamespace(is_old=is_old, usd_per_h=usd / hours)
    return Fleet(source=stand_in, query=stand_in, option=stand_in, hours=hours, usd=usd)


def answer(*fleets: Fleet) -> FleetAnswer:
    return FleetAnswer(FleetGoal(samples=1.0), tuple(sorted(fleets, key=lambda each: each.usd)))


def test_a_fleet_with_an_old_price_is_no_answer_and_is_named_if_it_is_cheaper() -> None:
    old, cheap, fast = fleet(60, 3, is_old=True), fleet(100, 4), fleet(200, 2)
    found = answer(old, cheap, fast)
    assert (found.cheapest, found.fastest, found.cheapest_by_old_price) == (cheap, fast, old)
    assert found.frontier() == [cheap, fast]


def test_an_old_price_that_is_not_the_lowest_is_not_named() -> None:
    found = answer(fleet(100, 4), fleet(160, 3, is_old=True))
    assert found.cheapest_by_old_price is None


def test_if_all_prices_are_old_they_are_compared_with_each_other() -> None:
    one, other = fleet(60, 3, is_old=True), fleet(100, 2, is_old=True)
    found = answer(one, other)
    assert (found.cheapest, found.fastest, found.cheapest_by_old_price) == (one, other, None)
