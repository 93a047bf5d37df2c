"""Dated prices of AWS, GCP and Azure instances, on demand and spot.

Prices change (a p4d spot instance was 70 % cheaper than on demand in 2022 and 25 % in 2026) and differ up to fourfold
between zones, so every price has a date and a source. The figures in the package are those of US regions; a user's CSV
file replaces them for the instances it names. An instance whose price is not known is listed without one: its price is
None, and `PricedInstance.price` raises.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.market.csv_rows import CsvRow, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REQUIRED_COLUMNS = ("instance", "on_demand_usd_h", "spot_usd_h")
"""Columns that a user's CSV must have; an empty cell means that the price is not known.

The columns zone, date (or as_of), source and the other fields of `PricedInstance` are optional.
"""

MAX_AGE_DAYS = 120
"""Prices older than this are marked, and produce a warning where they are used."""

_HARDWARE_COLUMNS = ("gpu", "gpu_count", "gpu_mem_gib")
_NOTICE_S = {"aws": 120, "gcp": 30, "azure": 30}


@dataclass(frozen=True, kw_only=True)
class PricedInstance:
    """An instance type and its prices, in dollars per hour, on one day."""

    cloud: str
    instance: str
    gpu: str
    """"none" if there is no GPU."""
    gpu_count: int
    gpu_mem_gib: float
    """Memory of one GPU."""
    vcpus: int
    mem_gib: float
    on_demand_usd_h: float | None
    """None: not known."""
    spot_usd_h: float | None
    """The median over the zones; None: not known."""
    spot_min_usd_h: float | None
    spot_max_usd_h: float | None
    notice_s: int
    """Seconds between the notice and the preemption of a spot instance."""
    as_of: date | None
    """None: a user's prices without a date, or no price."""
    source: str
    """Source of the prices; without prices, source of the figures of the hardware."""
    zone_prices: Mapping[str, float] = field(default_factory=dict)
    """Spot prices by zone, if known."""
    note: str = ""

    @property
    def discount(self) -> float | None:
        """How much cheaper spot is, as a share of the on-demand price; None if one of the two is not known."""
        if self.spot_usd_h is None or not self.on_demand_usd_h:
            return None
        return 1 - self.spot_usd_h / self.on_demand_usd_h

    @property
    def zone_spread(self) -> float | None:
        """The highest spot price of a zone as a multiple of the lowest; None if they are not known."""
        if self.spot_max_usd_h is None or not self.spot_min_usd_h:
            return None
        return self.spot_max_usd_h / self.spot_min_usd_h

    @property
    def spot_equals_on_demand(self) -> bool:
        """A spot price without any discount: the source most likely has no spot price."""
        return self.spot_usd_h is not None and self.spot_usd_h == self.on_demand_usd_h

    def is_old(self, today: date) -> bool:
        """Whether the prices are more than `MAX_AGE_DAYS` older than `today`."""
        return self.as_of is not None and (today - self.as_of).days > MAX_AGE_DAYS

    def per_gpu(self, usd_h: float | None) -> float | None:
        """A price of the instance per GPU; None without a price or a GPU."""
        return None if usd_h is None or not self.gpu_count else usd_h / self.gpu_count

    def price(self, *, spot: bool = True, zone: str | None = None) -> float:
        """Dollars per hour. Raises UsageError if the price, or the price in the zone, is not known."""
        if zone is not None and spot:
            return self._zone_price(zone)
        price = self.spot_usd_h if spot else self.on_demand_usd_h
        if price is None:
            kind, other = ("spot", self.on_demand_usd_h) if spot else ("on-demand", self.spot_usd_h)
            instead = f"; its {'on-demand' if spot else 'spot'} price is {other:g} $/h" if other is not None else ""
            raise UsageError(f"the {kind} price of {self.instance} is not known: give it with --prices CSV{instead}")
        return price

    def _zone_price(self, zone: str) -> float:
        if zone not in self.zone_prices:
            known = ", ".join(sorted(self.zone_prices)) or "none"
            raise UsageError(
                f"the spot price of {self.instance} in zone {zone!r} is not known: the known ones are {known}"
            )
        return self.zone_prices[zone]

    def price_warnings(self, today: date, *, spot: bool = True) -> tuple[str, ...]:
        """What to know before relying on the price: one sentence for an old price, one for a missing discount."""
        found = []
        if self.is_old(today) and self.as_of is not None:
            age = f"{(today - self.as_of).days} days old ({self.as_of}, {self.source})"
            found.append(f"the price of {self.instance} is {age}: update it with 'culm prices update' and --prices")
        if spot and self.spot_equals_on_demand:
            price = f"{self.spot_usd_h:g} $/h, {self.source}"
            found.append(
                f"the spot price of {self.instance} equals its on-demand price ({price}): "
                "the source probably has no spot price; give it with --prices"
            )
        return tuple(found)


@dataclass(frozen=True)
class PriceCatalogue:
    """Instances by name, each with the prices of several days."""

    instances: tuple[PricedInstance, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(machine.instance for machine in self.instances))

    def find(self, name: str, on: date | str | None = None) -> PricedInstance:
        """The instance at its newest prices, or at those valid on a day ("2022-12-31").

        Raises UsageError for an unknown name (with the nearest known one), and for a day before the first price.
        """
        wanted = self._full_name(name.strip().lower())
        quotes = [machine for machine in self.instances if machine.instance.lower() == wanted]
        if not quotes:
            raise UsageError(f"there is no instance {name!r} in the catalogue: {self._closest_name(name)}")
        day = parse_date(on)
        valid = [machine for machine in quotes if day is None or machine.as_of is None or machine.as_of <= day]
        if not valid:
            first = min(machine.as_of for machine in quotes if machine.as_of)
            raise UsageError(f"there is no price of {name} on {day}: the first is from {first}")
        return max(valid, key=_price_date)

    def _full_name(self, name: str) -> str:
        """The name with its accelerators, as in "a3-megagpu-8g+8xH100", if only the machine type is given."""
        names = [known.lower() for known in self.names]
        longer = [known for known in names if known.partition("+")[0] == name]
        return longer[0] if name not in names and len(longer) == 1 else name

    def _closest_name(self, name: str) -> str:
        by_lower = {known.lower(): known for known in self.names}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
        return f"did you mean {by_lower[close[0]]}?" if close else f"it has {', '.join(self.names)}"


def load_catalogue(path: str | Path | None = None) -> PriceCatalogue:
    """The built-in prices. Rows of the CSV file `path` replace those of the same instances.

    Raises UsageError, with the line, if the file cannot be read or has an invalid row.
    """
    seed = _builtin_catalogue()
    return seed if path is None else _override(seed, _read_user_prices(Path(path), seed))


@cache
def _builtin_catalogue() -> PriceCatalogue:
    folder = resources.files("culm.market") / "data"
    machines = read_rows((folder / "machines.csv").read_text("utf-8"), "machines.csv", REQUIRED_COLUMNS)
    zones = read_rows((folder / "zones.csv").read_text("utf-8"), "zones.csv", REQUIRED_COLUMNS)
    listed = [_instance_from_row(row) for row in machines]
    history = _group_by_zone(zones, {machine.instance: machine for machine in reversed(listed)})
    days = {(machine.instance, machine.as_of) for machine in listed}
    older = [machine for machine in history if (machine.instance, machine.as_of) not in days]
    return PriceCatalogue((*(_with_zones(machine, history) for machine in listed), *older))


def _with_zones(machine: PricedInstance, history: Iterable[PricedInstance]) -> PricedInstance:
    """The newest zone prices that are not newer than the instance's own."""
    same = (past for past in history if past.instance == machine.instance and _price_date(past) <= _price_date(machine))
    newest = max(same, key=_price_date, default=None)
    return machine if newest is None else replace(machine, zone_prices=newest.zone_prices)


def _group_by_zone(rows: Iterable[CsvRow], hardware: Mapping[str, PricedInstance]) -> list[PricedInstance]:
    """One instance for all rows with the same name and day, with the median over its zones."""
    groups: dict[tuple[str, date | None], list[CsvRow]] = {}
    for row in rows:
        groups.setdefault((row.get_text("instance"), _row_date(row)), []).append(row)
    return [_instance_of_zones(group, as_of, hardware.get(instance)) for (instance, as_of), group in groups.items()]


def _instance_of_zones(rows: list[CsvRow], as_of: date | None, known: PricedInstance | None) -> PricedInstance:
    spot = [(row, price) for row in rows if (price := row.get_optional_number("spot_usd_h")) is not None]
    prices = [price for _, price in spot]
    on_demand = [price for row in rows if (price := row.get_optional_number("on_demand_usd_h")) is not None]
    return replace(
        _instance_from_row(rows[0], known),
        on_demand_usd_h=median(on_demand) if on_demand else None,
        spot_usd_h=median(prices) if prices else None,
        spot_min_usd_h=min((row.get_number("spot_min_usd_h", price) for row, price in spot), default=None),
        spot_max_usd_h=max((row.get_number("spot_max_usd_h", price) for row, price in spot), default=None),
        as_of=as_of,
        zone_prices={row.get_text("zone"): price for row, price in spot if row.has_value("zone")},
    )


def _row_date(row: CsvRow) -> date | None:
    return row.get_date("as_of" if row.has_value("as_of") else "date")


def _instance_from_row(row: CsvRow, known: PricedInstance | None = None) -> PricedInstance:
    """A row as an instance; hardware columns that it lacks are taken from a known one."""
    spot = row.get_optional_number("spot_usd_h")
    cloud = row.get_text("cloud", known.cloud if known else "own")
    return PricedInstance(
        cloud=cloud,
        instance=known.instance if known else row.get_text("instance"),
        gpu=row.get_text("gpu", known.gpu if known else None),
        gpu_count=row.get_int("gpu_count", known.gpu_count if known else None),
        gpu_mem_gib=row.get_number("gpu_mem_gib", known.gpu_mem_gib if known else None),
        vcpus=row.get_int("vcpus", known.vcpus if known else 0),
        mem_gib=row.get_number("mem_gib", known.mem_gib if known else 0.0),
        on_demand_usd_h=row.get_optional_number("on_demand_usd_h"),
        spot_usd_h=spot,
        spot_min_usd_h=row.get_optional_number("spot_min_usd_h", spot),
        spot_max_usd_h=row.get_optional_number("spot_max_usd_h", spot),
        notice_s=row.get_int("notice_s", known.notice_s if known else _NOTICE_S.get(cloud, 0)),
        as_of=_row_date(row),
        source=row.get_text("source", row.source),
        note=row.get_text("note", ""),
    )


def _read_user_prices(path: Path, seed: PriceCatalogue) -> list[PricedInstance]:
    """The instances of a user's file."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"the prices {str(path)!r} could not be read: {reason}") from error
    rows = read_rows(text.replace("spot_median_usd_h", "spot_usd_h"), path.name, REQUIRED_COLUMNS)
    hardware = {name.lower(): seed.find(name) for name in seed.names}
    known = {row.get_text("instance"): hardware.get(row.get_text("instance").lower()) for row in rows}
    for row in rows:
        _check_hardware(row, known[row.get_text("instance")])
    return _group_by_zone(rows, {name: machine for name, machine in known.items() if machine})


def _check_hardware(row: CsvRow, known: PricedInstance | None) -> None:
    missing = [column for column in _HARDWARE_COLUMNS if not row.has_value(column)]
    if known is None and missing:
        name = row.get_text("instance")
        raise row.error(f"names {name!r}, which is not in the catalogue: add {', '.join(missing)}")


def _override(seed: PriceCatalogue, user_instances: list[PricedInstance]) -> PriceCatalogue:
    replaced = {machine.instance for machine in user_instances}
    return PriceCatalogue(
        (*user_instances, *(machine for machine in seed.instances if machine.instance not in replaced))
    )


def _price_date(machine: PricedInstance) -> date:
    return machine.as_of or date.max


def parse_date(on: date | str | None) -> date | None:
    """A date written as 2026-08-22. Raises UsageError for another form."""
    if not isinstance(on, str):
        return on
    try:
        return date.fromisoformat(on)
    except ValueError:
        raise UsageError(f"the date is {on!r}: write it as 2026-08-22") from None
