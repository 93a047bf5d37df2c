"""The ledger of rented nodes: every second at its price."""

from __future__ import annotations

import random

import pytest

from culm.errors import UsageError
from culm.market.cost_record import CostRecord
from culm.market.rental_cost import (
    CostLedger,
    RentalTerms,
    mean_on_demand_usd_h,
    on_demand_equivalent,
    rental_terms,
)

HOUR = 3600.0


def terms(usd_h: float = 3.6, **fields: object) -> RentalTerms:
    return RentalTerms(usd_h=usd_h, **fields)  # type: ignore[arg-type]


def test_a_node_is_billed_by_the_second_and_for_a_minute_at_least() -> None:
    ledger = CostLedger()
    ledger.rent("a", terms(), 100.0)
    ledger.rent("b", terms(), 100.0)
    assert ledger.usd(130.0) == pytest.approx(2 * 30 * 0.001)
    assert ledger.usd_if_ended(130.0) == pytest.approx(2 * 60 * 0.001)
    ledger.release("a", 130.0)
    ledger.release("b", 1100.0)
    assert [each.usd for each in ledger.rentals] == pytest.approx([0.06, 1.0])
    assert ledger.usd(9e9) == pytest.approx(1.06)
    assert ledger.usd_h == 0.0


def test_a_node_that_was_rented_before_it_registered_is_billed_from_then_on() -> None:
    ledger = CostLedger()
    ledger.rent("a", terms(rented_at=40.0), 100.0)
    assert ledger.usd(100.0) == pytest.approx(0.06)
    (rental,) = ledger.rentals_at(100.0)
    assert (rental.started_at, rental.waiting_s) == (40.0, 60.0)


def test_a_machine_that_joins_again_stays_one_rental_without_a_gap() -> None:
    ledger = CostLedger()
    ledger.rent("machine", terms(), 0.0)
    ledger.release("machine", 10.0)
    assert ledger.usd(50.0) == pytest.approx(0.06)  # the minute
    ledger.rent("machine", terms(), 100.0)
    ledger.release("machine", 200.0)
    assert len(ledger.rentals) == 1
    assert ledger.usd(500.0) == pytest.approx(0.2)


def test_a_price_counts_from_its_change_on() -> None:
    ledger = CostLedger()
    ledger.rent("a", terms(3.6), 0.0)
    assert ledger.change_price("a", 7.2, HOUR)
    assert not ledger.change_price("a", 7.2, HOUR + 1)
    assert not ledger.change_price("b", 7.2, HOUR + 1)
    ledger.release("a", 2 * HOUR)
    assert ledger.usd(3 * HOUR) == pytest.approx(3.6 + 7.2)
    assert [(each.at, each.usd_h) for each in ledger.rentals[0].prices] == [(0.0, 3.6), (HOUR, 7.2)]


def test_waiting_and_recovering_are_parts_of_the_cost() -> None:
    ledger = CostLedger()
    ledger.rent("a", terms(), 0.0)
    ledger.rent("b", terms(), 0.0)
    ledger.set_work({"a"}, 100.0)
    ledger.set_work({"a"}, 300.0, recovering=True)
    ledger.set_work({"a", "b"}, 350.0)
    a, b = ledger.rentals_at(1000.0)
    assert (a.waiting_s, a.recovery_s, b.waiting_s, b.recovery_s) == (100.0, 50.0, 350.0, 0.0)
    assert (a.usd, a.recovery_usd) == pytest.approx((1.0, 0.05))


@pytest.mark.parametrize("seed", range(5))
def test_the_total_is_the_sum_of_the_rentals_whatever_happens(seed: int) -> None:
    """Also through a copy, as for a new leader: an independent bill of every second agrees."""
    rng, ledger, now = random.Random(seed), CostLedger(), 0.0
    began: dict[str, float] = {}
    prices: dict[str, float] = {}
    bill: dict[str, float] = {}
    lived: dict[str, float] = {}
    for number in range(300):
        step = rng.expovariate(1 / 20)
        for name in began:
            bill[name] += step * prices[name] / HOUR
            lived[name] += step
        now += step
        kind = rng.choice(["rent", "rent", "release", "price", "copy", "work"])
        if kind == "rent":
            name = f"n{number}"
            began[name], prices[name], bill[name], lived[name] = now, rng.uniform(1, 9), 0.0, 0.0
            ledger.rent(name, terms(prices[name]), now)
        elif kind == "release" and began:
            name = rng.choice(sorted(began))
            del began[name]
            bill[name] += max(0.0, 60.0 - lived[name]) * prices[name] / HOUR
            ledger.release(name, now)
        elif kind == "price" and began:
            name = rng.choice(sorted(began))
            prices[name] = rng.uniform(1, 9)
            ledger.change_price(name, prices[name], now)
        elif kind == "copy":
            ledger = CostLedger(ledger.rentals_at(now))
        else:
            ledger.set_work(set(rng.sample(sorted(began), len(began) // 2)), now, recovering=rng.random() < 0.5)
        assert ledger.usd(now) == pytest.approx(sum(bill.values()), rel=1e-9)
    assert {each.name: each.usd for each in ledger.rentals_at(now)} == pytest.approx(bill, rel=1e-9)


def test_terms_come_from_the_catalogue_unless_a_price_is_given() -> None:
    spot = rental_terms(instance="p3.2xlarge", market="spot")
    own = rental_terms(instance="P3.2xlarge", market="spot", usd_h=1.5)
    assert spot is not None and own is not None
    assert spot.on_demand_usd_h == own.on_demand_usd_h == 3.06
    assert (own.usd_h, own.market) == (1.5, "spot")
    assert rental_terms(usd_h=2.0) == RentalTerms(usd_h=2.0, on_demand_usd_h=2.0)
    assert rental_terms(usd_h=2.0, market="spot") == RentalTerms(usd_h=2.0, market="spot")
    assert rental_terms() is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"market": "spot"}, "--market spot alone does not determine a price"),
        ({"usd_h": -1.0}, "--price is -1"),
        ({"market": "cheap", "usd_h": 1.0}, "--market is 'cheap': use spot or on-demand"),
        ({"instance": "p3.2xlargs"}, "did you mean p3.2xlarge"),
    ],
)
def test_wrong_terms_name_the_fix(given: dict[str, object], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        rental_terms(**given)  # type: ignore[arg-type]


def test_the_on_demand_equivalent_needs_every_price() -> None:
    ledger = CostLedger()
    ledger.rent("a", terms(1.0, on_demand_usd_h=3.0), 0.0)
    ledger.rent("b", terms(1.0, on_demand_usd_h=6.0), 0.0)
    assert mean_on_demand_usd_h(ledger.rentals_at(100.0)) == pytest.approx(4.5)
    ledger.rent("c", terms(1.0), 100.0)
    assert mean_on_demand_usd_h(ledger.rentals_at(200.0)) is None
    assert on_demand_equivalent(steps=100, step_s=36.0, nodes=4, on_demand_usd_h=4.5) == pytest.approx(18.0)


def test_a_run_that_was_cut_off_is_billed_until_its_last_line() -> None:
    ledger = CostLedger()
    ledger.rent("a", terms(), 0.0)
    record = CostRecord(started_at=0.0, updated_at=10.0, rentals=ledger.rentals_at(10.0))
    assert record.closed(1000.0).usd == pytest.approx(1.0)
    assert record.closed(20.0).usd == pytest.approx(0.06)
    assert record.accrued(500.0).usd == pytest.approx(0.5)
    assert record.usd_h == pytest.approx(3.6)
