"""Prices of EC2 instances: spot prices of this minute from EC2, on-demand prices from the catalogue."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.errors import CulmError
from culm.machines.engines.catalogue_price import catalogue_price

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from culm.machines.engines.aws_account import AwsAccount
    from culm.machines.machine_provider import Market

_MAX_AGE_S = 300.0
"""How long spot prices are used before EC2 is asked again. They change several times a day."""


class SpotPrices(NamedTuple):
    """The spot prices of one instance type."""

    asked_at: float
    by_zone: dict[str, float]


class Ec2Prices:
    """Prices in one region. Spot prices fall back to the catalogue where EC2 does not tell them."""

    def __init__(self, account: AwsAccount, now: Callable[[], float] = time.monotonic) -> None:
        self._account, self._now = account, now
        self._spot: dict[str, SpotPrices] = {}

    def price(self, instance: str, market: Market, zone: str = "") -> float | None:
        """Dollars per hour of one machine; without a `zone` the median over the zones. None: not known."""
        if market == "on-demand":
            return catalogue_price(instance, spot=False)
        by_zone = self.spot_by_zone(instance)
        if zone:
            return by_zone.get(zone)
        return median(by_zone.values()) if by_zone else catalogue_price(instance, spot=True)

    def spot_by_zone(self, instance: str) -> dict[str, float]:
        """The spot price of a type in every zone that has it; empty if EC2 does not tell."""
        known = self._spot.get(instance)
        if known is None or self._now() - known.asked_at > _MAX_AGE_S:
            known = SpotPrices(self._now(), self._ask(instance))
            self._spot[instance] = known
        return known.by_zone

    def _ask(self, instance: str) -> dict[str, float]:
        try:
            history = self._account.list_all(
                "ec2",
                "describe_spot_price_history",
                "SpotPriceHistory",
                InstanceTypes=[instance],
                ProductDescriptions=["Linux/UNIX"],
                StartTime=time.time(),
            )
        except CulmError:  # a price is no reason to end a run
            return {}
        return newest_by_zone(history)


def newest_by_zone(history: Iterable[dict[str, Any]]) -> dict[str, float]:
    """The newest price of each zone in an answer of DescribeSpotPriceHistory."""
    ordered = sorted(history, key=lambda entry: str(entry["Timestamp"]))
    return {entry["AvailabilityZone"]: float(entry["SpotPrice"]) for entry in ordered}
