"""The cost of a run as data: cost.json of a run folder, and sums by node and by kind of node. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from culm.market.rental_cost import HOUR_S, Rental, accrued_until


class CostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes of a run have cost. The leader writes it to cost.json whenever a node comes or goes."""

    started_at: float
    """The start of the run, by the clock of the rentals."""
    updated_at: float
    ended: bool = False
    rentals: tuple[Rental, ...] = ()
    earlier: tuple[Rental, ...] = ()
    """Rentals of the runs that this one was resumed from."""
    steps: int = 0
    samples: int = 0
    """Samples that were trained on and not lost again."""
    redone_share: float = 0.0
    """Share of the work, without waiting and recoveries, that was repeated after a return to a checkpoint."""
    on_demand_usd: float | None = None
    """What the same useful steps cost on demand, including those before a resume; None: a price is not known."""

    def closed(self, at: float) -> CostRecord:
        """The record of a run that has ended without writing it: its nodes are billed until a time."""
        ended = tuple(_ended(each, max(at, each.accrued_at)) for each in self.rentals)
        return msgspec.structs.replace(self, rentals=ended, updated_at=max(at, self.updated_at), ended=True)

    def accrued(self, now: float) -> CostRecord:
        """The record of a run that goes on, with what its nodes have cost until now."""
        rentals = tuple(each if each.ended_at is not None else accrued_until(each, now) for each in self.rentals)
        return msgspec.structs.replace(self, rentals=rentals, updated_at=max(now, self.updated_at))

    def before_resume(self) -> tuple[Rental, ...]:
        """The rentals of a run that has ended, for the run that is resumed from it."""
        return (*self.earlier, *self.closed(self.updated_at).rentals)

    @property
    def all_rentals(self) -> tuple[Rental, ...]:
        return (*self.earlier, *self.rentals)

    @property
    def usd(self) -> float:
        """Dollars so far, with those before a resume."""
        return math.fsum(each.usd for each in self.all_rentals)

    @property
    def usd_h(self) -> float:
        """Dollars per hour of the nodes that are rented now."""
        return math.fsum(each.usd_h for each in self.rentals if each.ended_at is None)

    @property
    def waiting_usd(self) -> float:
        return math.fsum(each.waiting_usd for each in self.all_rentals)

    @property
    def recovery_usd(self) -> float:
        return math.fsum(each.recovery_usd for each in self.all_rentals)

    @property
    def redone_usd(self) -> float:
        """What was spent on steps that were run again after a return to a checkpoint."""
        return self.redone_share * max(0.0, self.usd - self.waiting_usd - self.recovery_usd)

    @property
    def usd_per_million(self) -> float | None:
        """Dollars per million samples; None: there were none."""
        return self.usd / self.samples * 1e6 if self.samples else None

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """One row per rented node."""
        return [
            *(_row(each, self, earlier=True) for each in self.earlier),
            *(_row(each, self, earlier=False) for each in self.rentals),
        ]

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """One row per instance, market and zone, the most expensive first."""
        groups: dict[tuple[str, str, str], list[Rental]] = {}
        for each in self.all_rentals:
            groups.setdefault((each.instance, each.market, each.zone), []).append(each)
        rows = [
            {
                "instance": instance,
                "market": market,
                "zone": zone,
                "nodes": len(group),
                "hours": math.fsum(_seconds(each) for each in group) / HOUR_S,
                "usd": math.fsum(each.usd for each in group),
                "mean_usd_h": _mean_usd_h(group),
            }
            for (instance, market, zone), group in groups.items()
        ]
        return sorted(rows, key=lambda row: -row["usd"])

    def as_json(self) -> dict[str, Any]:
        """The figures of `culm cost --json`."""
        return {
            "cost_usd": self.usd,
            "cost_on_demand_usd": self.on_demand_usd,
            "usd_per_million": self.usd_per_million,
            "usd_per_h": self.usd_h,
            "hours": math.fsum(_seconds(each) for each in self.all_rentals) / HOUR_S,
            "ended": self.ended,
            "steps": self.steps,
            "samples": self.samples,
            "waiting_usd": self.waiting_usd,
            "recovery_usd": self.recovery_usd,
            "redone_usd": self.redone_usd,
            "earlier_usd": math.fsum(each.usd for each in self.earlier),
            "kinds": self.kinds,
            "nodes": self.nodes,
        }


decode_cost_record = msgspec.json.Decoder(CostRecord).decode


def cost_fields(record: CostRecord) -> Mapping[str, float | None]:
    """The fields of summary.json."""
    return {"cost_usd": record.usd, "cost_on_demand_usd": record.on_demand_usd}


def _ended(rental: Rental, at: float) -> Rental:
    if rental.ended_at is not None:
        return rental
    return msgspec.structs.replace(
        rental, usd=rental.usd_if_ended(at), accrued_at=max(at, rental.accrued_at), ended_at=at
    )


def _seconds(rental: Rental) -> float:
    return max(0.0, rental.accrued_at - rental.started_at)


def _mean_usd_h(rentals: Iterable[Rental]) -> float:
    """The mean price over time, without what was added up to the shortest billed time."""
    found = list(rentals)
    seconds = math.fsum(_seconds(each) for each in found)
    if not seconds:
        return math.fsum(each.usd_h for each in found) / len(found)
    return math.fsum(_usd_by_price(each) for each in found) / seconds * HOUR_S


def _usd_by_price(rental: Rental) -> float:
    """Price times time."""
    ends = [*(change.at for change in rental.prices[1:]), rental.accrued_at]
    return math.fsum(
        change.usd_h * max(0.0, end - change.at) / HOUR_S for change, end in zip(rental.prices, ends, strict=True)
    )


def _row(rental: Rental, record: CostRecord, *, earlier: bool) -> dict[str, Any]:
    start = record.started_at
    return {
        "node": rental.name,
        "instance": rental.instance,
        "market": rental.market,
        "zone": rental.zone,
        "from_h": (rental.started_at - start) / HOUR_S,
        "to_h": None if rental.ended_at is None else (rental.ended_at - start) / HOUR_S,
        "hours": _seconds(rental) / HOUR_S,
        "usd_per_h": [{"from_h": (change.at - start) / HOUR_S, "usd_per_h": change.usd_h} for change in rental.prices],
        "usd": rental.usd,
        "waiting_usd": rental.waiting_usd,
        "recovery_usd": rental.recovery_usd,
        "before_resume": earlier,
    }
