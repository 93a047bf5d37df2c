"""Lists, filters and compares the instances of a price catalogue."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from datetime import date
from fnmatch import fnmatch
from statistics import median
from typing import TYPE_CHECKING

from culm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection

    from culm.market.catalogue import PriceCatalogue, PricedInstance

_AWS_DIRECTIONS = {
    "north": "n", "south": "s", "east": "e", "west": "w", "central": "c", "northeast": "ne", "northwest": "nw",
    "southeast": "se", "southwest": "sw",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PriceFilter:
    """Which instances to list; None: all."""

    cloud: str | None = None
    instance: str | None = None
    """A name, a part of it, or a pattern such as p5*."""
    accelerator: str | None = None
    """A name without regard to its memory: A100 also finds A100-80GB."""
    zone: str | None = None
    """A zone or a region."""
    max_usd_h: float | None = None
    """Dollars per hour of the instance, spot if that price is known."""


def list_prices(catalogue: PriceCatalogue, wanted: PriceFilter, *, on: date | None = None) -> list[PricedInstance]:
    """The instances that match, each at its newest prices or those of a day, the cheapest GPU first.

    Instances without a price come last, and never match a zone or a maximum price. Raises UsageError if none matches.
    """
    matching = [found for machine in _valid_instances(catalogue, on) if (found := _match(machine, wanted)) is not None]
    if not matching:
        raise UsageError(
            f"no instance matches {_describe(wanted)}: {_closest(catalogue, wanted)}'culm prices' lists all"
        )
    return sorted(matching, key=_comparison_key)


def price_marks(machine: PricedInstance, today: date) -> tuple[str, ...]:
    """Short marks for what is wrong with the prices of an instance."""
    if machine.on_demand_usd_h is None and machine.spot_usd_h is None:
        return ("no price",)
    marks = {
        "old": machine.is_old(today),
        "undated": machine.as_of is None,
        "spot = on demand": machine.spot_equals_on_demand,
        "no spot price": machine.spot_usd_h is None,
        "no on-demand price": machine.on_demand_usd_h is None,
    }
    return tuple(mark for mark, holds in marks.items() if holds)


def comparable_price(machine: PricedInstance) -> float | None:
    """The spot price of the instance, or its on-demand price if the spot price is not known."""
    return machine.on_demand_usd_h if machine.spot_usd_h is None else machine.spot_usd_h


def zones_of(zone: str, known: Collection[str]) -> list[str]:
    """The known zones that a zone or region names. AWS regions are also found by zone IDs: us-east-1 has use1-az1."""
    text = zone.strip().lower()
    prefixes = [f"{text}-", *([f"{short}-"] if (short := _aws_short_region(text)) else [])]
    return [name for name in known if name.lower() == text or name.lower().startswith(tuple(prefixes))]


def _aws_short_region(region: str) -> str | None:
    match = re.fullmatch(r"([a-z]{2})-([a-z]+)-([0-9])", region)
    return f"{match[1]}{_AWS_DIRECTIONS[match[2]]}{match[3]}" if match and match[2] in _AWS_DIRECTIONS else None


def _valid_instances(catalogue: PriceCatalogue, day: date | None) -> list[PricedInstance]:
    """Every instance that has a price on the day, or none at all."""
    listed = {machine.instance for machine in catalogue.instances if day is None or _is_before(machine, day)}
    return [catalogue.find(name, day) for name in catalogue.names if name in listed]


def _is_before(machine: PricedInstance, day: date) -> bool:
    return machine.as_of is None or machine.as_of <= day


def _match(machine: PricedInstance, wanted: PriceFilter) -> PricedInstance | None:
    """The instance, with the prices of the wanted zones only; None if it does not match."""
    if wanted.cloud is not None and machine.cloud != wanted.cloud.lower():
        return None
    if wanted.instance is not None and not _name_matches(machine.instance.lower(), wanted.instance.strip().lower()):
        return None
    if wanted.accelerator is not None:
        gpu, text = machine.gpu.lower(), wanted.accelerator.strip().lower()
        if gpu != text and not gpu.startswith(f"{text}-"):
            return None
    found = machine if wanted.zone is None else _in_zones(machine, zones_of(wanted.zone, machine.zone_prices))
    if found is not None and wanted.max_usd_h is not None:
        price = comparable_price(found)
        return found if price is not None and price <= wanted.max_usd_h else None
    return found


def _name_matches(name: str, text: str) -> bool:
    return text in name or fnmatch(name, text)


def _in_zones(machine: PricedInstance, zones: list[str]) -> PricedInstance | None:
    prices = {zone: machine.zone_prices[zone] for zone in zones}
    if not prices:
        return None
    return replace(
        machine,
        zone_prices=prices,
        spot_usd_h=median(prices.values()),
        spot_min_usd_h=min(prices.values()),
        spot_max_usd_h=max(prices.values()),
    )


def _comparison_key(machine: PricedInstance) -> tuple[bool, bool, float, str]:
    price = comparable_price(machine)
    per_gpu = machine.per_gpu(price)
    return (price is None, per_gpu is None, per_gpu or price or 0.0, machine.instance)


def _closest(catalogue: PriceCatalogue, wanted: PriceFilter) -> str:
    """The instances or accelerators with similar names, if the filter names one that does not exist."""
    machines = [catalogue.find(name) for name in catalogue.names]
    for given, known in (
        (wanted.instance, {machine.instance for machine in machines}),
        (wanted.accelerator, {machine.gpu for machine in machines}),
    ):
        by_name = {name.lower(): name for name in known}
        if given and (close := difflib.get_close_matches(given.lower(), by_name, n=3)):
            return f"did you mean {' or '.join(by_name[name] for name in close)}? "
    return ""


def _describe(wanted: PriceFilter) -> str:
    options = {
        "--cloud": wanted.cloud, "--instance": wanted.instance, "--accelerator": wanted.accelerator,
        "--zone": wanted.zone, "--max-price": wanted.max_usd_h,
    }  # fmt: skip
    return " ".join(f"{name} {value}" for name, value in options.items() if value is not None) or "the date"
