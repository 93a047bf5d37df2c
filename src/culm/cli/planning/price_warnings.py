"""Warnings about the price that a command uses: too old, or a spot price without a discount."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.cli.error_reporting import print_error
from culm.market.catalogue import parse_date
from culm.price_lists import current_date

if TYPE_CHECKING:
    from culm.market.catalogue import PricedInstance


def print_price_warnings(machine: PricedInstance, on: str | None, *, spot: bool) -> tuple[str, ...]:
    """Print a line on stderr for each reason not to rely on the price, and return the lines.

    The age of a price counts from today, or from the day whose prices were asked for.
    """
    found = machine.price_warnings(parse_date(on) or current_date(), spot=spot)
    for sentence in found:
        print_error(f"warning: {sentence}")
    return found
