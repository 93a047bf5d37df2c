"""Prices from culm's catalogue for engines that do not tell theirs."""

from __future__ import annotations

from culm.errors import UsageError
from culm.market import load_catalogue


def catalogue_price(instance: str, *, spot: bool) -> float | None:
    """Dollars per hour of an instance type; None if the catalogue does not have it."""
    try:
        return load_catalogue().find(instance).price(spot=spot) if instance else None
    except UsageError:
        return None
