"""What rented nodes cost: the one ledger of dollars, used by the leader of a real run and by the simulator. Pure.

Billing rule: a node is billed by the second, from when it was rented until it is gone, at the price that was valid in
each second, and for at least `MINIMUM_S` (the rule of EC2 and Compute Engine for Linux machines). It does not matter
what the node does meanwhile: boot, wait for a slot, train or repeat work. The ledger also keeps what of it was spent on
waiting and on recoveries.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias

import msgspec

from culm.errors import UsageError
from culm.market.catalogue import PriceCatalogue, load_catalogue

HOUR_S = 3600.0
MINIMUM_S = 60.0
"""The shortest time that is billed for a rented node."""

RentalMarket: TypeAlias = Literal["spot", "on-demand"]
RENTAL_MARKETS: tuple[RentalMarket, ...] = ("spot", "on-demand")


class RentalTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a node costs, as its agent registers it with the run."""

    usd_h: float
    """Dollars per hour of the node with all its workers."""
    on_demand_usd_h: float | None = None
    """The on-demand price of the same instance; None: not known."""
    instance: str = ""
    market: RentalMarket = "on-demand"
    zone: str = ""
    machine: str = ""
    """The id of the machine where it is rented: a machine that joins again as a new node stays one rental. Empty: each
    node is a rental of its own."""
    rented_at: float | None = None
    """Seconds since 1970; None: when the node registered."""


class PriceChange(msgspec.Struct, frozen=True):
    """A price and the time from which it is valid."""

    at: float
    usd_h: float


class Rental(msgspec.Struct, kw_only=True):
    """One rented node: its price over time, and what it has cost up to `accrued_at`."""

    name: str
    instance: str = ""
    market: RentalMarket = "on-demand"
    zone: str = ""
    on_demand_usd_h: float | None = None
    started_at: float
    ended_at: float | None = None
    """None: it is still rented."""
    prices: list[PriceChange]
    """The first is valid from `started_at`."""
    accrued_at: float
    usd: float = 0.0
    """Up to `accrued_at`. What is missing to the shortest billed time is added when the rental ends."""
    waiting_s: float = 0.0
    """Seconds without work for the run: before its first step, and without a slot."""
    waiting_usd: float = 0.0
    recovery_s: float = 0.0
    """Seconds in which the run halted, decided, moved layers or repeated work after a change of membership."""
    recovery_usd: float = 0.0

    @property
    def usd_h(self) -> float:
        """The current price."""
        return self.prices[-1].usd_h

    @property
    def seconds(self) -> float:
        """Seconds for which it was rented, up to `accrued_at`."""
        return self.accrued_at - self.started_at

    def usd_if_ended(self, at: float, minimum_s: float = MINIMUM_S) -> float:
        """What it costs in all if it ends at a time, at the current price from now on."""
        if self.ended_at is not None:
            return self.usd
        end = max(at, self.accrued_at, self.started_at + minimum_s)
        return self.usd + (end - self.accrued_at) * self.usd_h / HOUR_S


class CostLedger:
    """Rentals and their cost. All times are those of one clock; a time before the last one counts as the last one."""

    def __init__(self, rentals: Iterable[Rental] = (), *, minimum_s: float = MINIMUM_S) -> None:
        """`rentals`: those of a ledger before, as `rentals` returned them; they are copied."""
        self._minimum_s = minimum_s
        self._rentals: dict[str, Rental] = {}
        self._open: dict[str, Rental] = {}
        self._working: set[str] = set()
        self._recovering = False
        self._now = -math.inf
        self._accrued_usd = 0.0
        """Dollars of all rentals up to `_now` ..."""
        self._usd_s = 0.0
        """... and per second from then on."""
        self.restore(rentals)

    def restore(self, rentals: Iterable[Rental]) -> None:
        """Replace all rentals. Which nodes work is not known until `set_work` is called."""
        self._rentals = {each.name: msgspec.structs.replace(each, prices=list(each.prices)) for each in rentals}
        self._open = {name: each for name, each in self._rentals.items() if each.ended_at is None}
        self._now = max((each.accrued_at for each in self._rentals.values()), default=-math.inf)
        for rental in self._open.values():
            self._accrue(rental, self._now)
        self._accrued_usd = math.fsum(each.usd for each in self._rentals.values())
        self._usd_s = math.fsum(each.usd_h for each in self._open.values()) / HOUR_S

    @property
    def rentals(self) -> tuple[Rental, ...]:
        """All rentals, in the order in which they began, each accrued up to its last change."""
        return tuple(self._rentals.values())

    def rentals_at(self, now: float) -> tuple[Rental, ...]:
        """Copies of all rentals, accrued up to now."""
        self._accrue_all(now)
        return tuple(msgspec.structs.replace(each, prices=list(each.prices)) for each in self._rentals.values())

    def open_rentals_at(self, now: float) -> tuple[Rental, ...]:
        """Copies of the rentals that go on, accrued up to now."""
        self._accrue_all(now)
        return tuple(msgspec.structs.replace(each, prices=list(each.prices)) for each in self._open.values())

    @property
    def ended_rentals(self) -> tuple[Rental, ...]:
        """The rentals that have ended, in the order in which they began. These objects do not change any more."""
        return tuple(each for each in self._rentals.values() if each.ended_at is not None)

    @property
    def open_names(self) -> Collection[str]:
        """The rentals that go on."""
        return self._open.keys()

    def rent(self, name: str, terms: RentalTerms, now: float) -> None:
        """A node is rented. If it was rented before and had ended, as a machine that joins again, the rental goes on:
        the machine was there meanwhile."""
        self._advance(now)
        known = self._rentals.get(name)
        if known is None:
            began = now if terms.rented_at is None else min(now, terms.rented_at)
            known = self._rentals[name] = Rental(
                name=name,
                instance=terms.instance,
                market=terms.market,
                zone=terms.zone,
                on_demand_usd_h=terms.on_demand_usd_h,
                started_at=began,
                prices=[PriceChange(began, terms.usd_h)],
                accrued_at=began,
            )
        elif known.ended_at is not None:
            known = self._rentals[name] = self._reopen(known)
        if name not in self._open:
            self._open[name] = known
            self._working.discard(name)
            self._accrued_usd += self._accrue(known, now)
            self._usd_s += known.usd_h / HOUR_S
        self._set_price(known, terms.usd_h, now)

    def _reopen(self, rental: Rental) -> Rental:
        """A copy of a rental without its end, and without what was added up to the shortest billed time."""
        billed_s = max(rental.seconds, self._minimum_s)
        extra_usd = (billed_s - rental.seconds) * rental.usd_h / HOUR_S
        self._accrued_usd -= extra_usd
        return msgspec.structs.replace(rental, prices=list(rental.prices), usd=rental.usd - extra_usd, ended_at=None)

    def release(self, name: str, now: float) -> Rental | None:
        """A node is not rented any more. Returns its rental; None: it was not rented."""
        self._advance(now)
        rental = self._open.pop(name, None)
        if rental is not None:
            self._accrue(rental, now)
            self._usd_s = self._usd_s - rental.usd_h / HOUR_S if self._open else 0.0
            before_usd, rental.usd = rental.usd, rental.usd_if_ended(rental.accrued_at, self._minimum_s)
            self._accrued_usd += rental.usd - before_usd
            rental.ended_at = rental.accrued_at
        self._working.discard(name)
        return rental

    def change_price(self, name: str, usd_h: float, now: float) -> bool:
        """From now on a node has another price. Returns whether that is a change."""
        rental = self._open.get(name)
        if rental is None or rental.usd_h == usd_h:
            return False
        self._advance(now)
        self._set_price(rental, usd_h, now)
        return True

    def _set_price(self, rental: Rental, usd_h: float, now: float) -> None:
        if rental.usd_h != usd_h:
            self._accrue(rental, now)
            self._usd_s += (usd_h - rental.usd_h) / HOUR_S
            rental.prices.append(PriceChange(now, usd_h))

    def set_work(self, working: Collection[str], now: float, *, recovering: bool = False) -> None:
        """Which rentals work for the run from now on; all others wait. `recovering`: those that work recover from a
        change of membership instead of training."""
        self._accrue_all(now)
        self._working, self._recovering = set(working), recovering

    def usd(self, now: float) -> float:
        """What all rentals have cost up to now, without what is still missing to the shortest billed time."""
        return self._accrued_usd + max(0.0, now - self._now) * self._usd_s if self._open else self._accrued_usd

    @property
    def usd_h(self) -> float:
        """Dollars per hour of all nodes that are rented now."""
        return self._usd_s * HOUR_S

    def usd_if_ended(self, at: float) -> float:
        """What all rentals cost in all if they end at a time, with the shortest billed time."""
        return math.fsum(rental.usd_if_ended(at, self._minimum_s) for rental in self._rentals.values())

    def _advance(self, now: float) -> None:
        """Add up all open rentals until now, without touching each of them."""
        self._accrued_usd = self.usd(now)
        self._now = max(now, self._now)

    def _accrue_all(self, now: float) -> None:
        self._advance(now)
        for rental in self._open.values():
            self._accrue(rental, now)

    def _accrue(self, rental: Rental, now: float) -> float:
        """Bill a rental until now. Returns the dollars that are added."""
        seconds = max(0.0, now - rental.accrued_at)
        usd = seconds * rental.usd_h / HOUR_S
        rental.usd += usd
        rental.accrued_at = max(now, rental.accrued_at)
        if rental.name not in self._working:
            rental.waiting_s += seconds
            rental.waiting_usd += usd
        elif self._recovering:
            rental.recovery_s += seconds
            rental.recovery_usd += usd
        return usd


def accrued_until(rental: Rental, now: float) -> Rental:
    """A copy of a rental that goes on, with what it has cost until now at its last price."""
    seconds = max(0.0, now - rental.accrued_at)
    return msgspec.structs.replace(
        rental, accrued_at=rental.accrued_at + seconds, usd=rental.usd + seconds * rental.usd_h / HOUR_S
    )


def on_demand_equivalent(*, steps: int, step_s: float, nodes: int, on_demand_usd_h: float) -> float:
    """What as many useful steps cost on nodes that are rented on demand and never lost: no waiting, nothing repeated.

    `step_s`: seconds of a step with all nodes and without a disturbance.
    """
    return steps * step_s * nodes * on_demand_usd_h / HOUR_S


def mean_on_demand_usd_h(rentals: Iterable[Rental]) -> float | None:
    """The mean on-demand price of a node, weighted by time; None: that of some node is not known."""
    found = [(each.seconds, each.on_demand_usd_h) for each in rentals]
    prices = [(seconds, price) for seconds, price in found if price is not None]
    weight = math.fsum(seconds for seconds, _ in prices)
    if not found or len(prices) < len(found) or not weight:
        return None
    return math.fsum(seconds * price for seconds, price in prices) / weight


def rental_terms(
    *,
    instance: str | None = None,
    market: str | None = None,
    usd_h: float | None = None,
    zone: str = "",
    machine: str = "",
    rented_at: float | None = None,
    catalogue: PriceCatalogue | None = None,
) -> RentalTerms | None:
    """The terms of a node from what its user says about it; None: nothing, so that it costs nothing.

    A price that is not given is that of the catalogue: `market` (default: on-demand) in `zone` if its price is known,
    else the median of the zones. Raises UsageError for an unknown instance or a price that is not known.
    """
    if market is not None and market not in RENTAL_MARKETS:
        raise UsageError(f"--market is {market!r}: use {' or '.join(RENTAL_MARKETS)}")
    if instance is None and usd_h is None:
        if market is not None:
            raise UsageError(
                f"--market {market} alone does not determine a price: add --price USD_PER_HOUR or --instance NAME"
            )
        return None
    if usd_h is not None and not 0 <= usd_h < math.inf:
        raise UsageError(f"--price is {usd_h:g}: use dollars per hour of a node, 0 or more")
    spot = market == "spot"
    on_demand = None if spot else usd_h
    if instance is not None:
        catalogue = catalogue or load_catalogue()
        if usd_h is None:
            machine_type = catalogue.find(instance)
            known_zone = zone if spot and zone in machine_type.zone_prices else None
            usd_h = machine_type.price(spot=spot, zone=known_zone)
        listed = {name.lower(): name for name in catalogue.names}.get(instance.lower())
        if on_demand is None and listed is not None:
            on_demand = catalogue.find(listed).on_demand_usd_h
    assert usd_h is not None
    return RentalTerms(
        usd_h=usd_h,
        on_demand_usd_h=usd_h if on_demand is None and not spot else on_demand,
        instance=instance or "",
        market="spot" if spot else "on-demand",
        zone=zone,
        machine=machine,
        rented_at=rented_at,
    )
