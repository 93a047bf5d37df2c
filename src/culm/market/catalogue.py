"""What machines cost, and when they did: dated prices of AWS, GCP and Azure, on demand and spot.

Prices move (a p4d at spot was 70 % off in 2022 and 25 % in 2026) and differ up to fourfold between zones, so a price
here always has a date. The figures that come with the package are those of US regions; a user's CSV file replaces
them for the instances it names.
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
from culm.market.table import Row, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

REQUIRED = ("instance", "on_demand_usd_h", "spot_usd_h")
"""What a user's CSV has at least; zone, as_of and the columns of `Machine` may stand beside them."""

_HARDWARE = ("gpu", "gpu_count", "gpu_mem_gib")
_NOTICE_S = {"aws": 120, "gcp": 30, "azure": 30}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A type of machine and its prices, in dollars per hour, on one day."""

    cloud: str
    instance: str
    gpu: str
    """"none" where there is no GPU."""
    gpu_count: int
    gpu_mem_gib: float
    """Of one GPU."""
    vcpus: int
    mem_gib: float
    on_demand_usd_h: float
    spot_usd_h: float
    """The median over the zones."""
    spot_min_usd_h: float
    spot_max_usd_h: float
    notice_s: int
    """How long before a spot machine is taken away one is told."""
    as_of: date | None
    """None: the prices of a user who gave no date."""
    zones: Mapping[str, float] = field(default_factory=dict)
    """Spot prices by zone, where they are known."""
    note: str = ""

    @property
    def discount(self) -> float:
        """How much less spot costs, as a share of the price on demand."""
        return 1 - self.spot_usd_h / self.on_demand_usd_h if self.on_demand_usd_h else 0.0

    def price(self, *, spot: bool = True, zone: str | None = None) -> float:
        """Dollars per hour. Raises UsageError for a zone whose price is not known."""
        if not spot:
            return self.on_demand_usd_h
        if zone is None:
            return self.spot_usd_h
        if zone not in self.zones:
            known = ", ".join(sorted(self.zones)) or "none"
            raise UsageError(f"the spot price of {self.instance} in zone {zone!r} is not known: known are {known}")
        return self.zones[zone]


@dataclass(frozen=True)
class Catalogue:
    """Machines by name, each with the prices of several days."""

    machines: tuple[Machine, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(machine.instance for machine in self.machines))

    def find(self, name: str, on: date | str | None = None) -> Machine:
        """The machine at its newest prices, or at those that held on a day ("2022-12-31").

        Raises UsageError for a name that is not there (with the nearest that is), and for a day before the first price.
        """
        quotes = [machine for machine in self.machines if machine.instance.lower() == name.strip().lower()]
        if not quotes:
            raise UsageError(f"there is no instance {name!r} in the catalogue: {self._nearest(name)}")
        day = _day(on)
        held = [machine for machine in quotes if day is None or machine.as_of is None or machine.as_of <= day]
        if not held:
            first = min(machine.as_of for machine in quotes if machine.as_of)
            raise UsageError(f"there is no price of {name} on {day}: the first is of {first}")
        return max(held, key=_age)

    def _nearest(self, name: str) -> str:
        by_lower = {known.lower(): known for known in self.names}
        close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
        return f"did you mean {by_lower[close[0]]}?" if close else f"it has {', '.join(self.names)}"


def catalogue(path: str | Path | None = None) -> Catalogue:
    """The prices that come with culm; where `path` names a CSV file, its rows replace those of the same instances.

    Raises UsageError, with the line, for a file that can not be read or has a bad row.
    """
    seed = _seed()
    return seed if path is None else _overridden(seed, _own(Path(path), seed))


@cache
def _seed() -> Catalogue:
    folder = resources.files("culm.market") / "data"
    machines = read_rows((folder / "machines.csv").read_text("utf-8"), "machines.csv", REQUIRED)
    zones = read_rows((folder / "zones.csv").read_text("utf-8"), "zones.csv", REQUIRED)
    listed = [_machine(row) for row in machines]
    history = _by_zone(zones, {machine.instance: machine for machine in reversed(listed)})
    days = {(machine.instance, machine.as_of) for machine in listed}
    older = [machine for machine in history if (machine.instance, machine.as_of) not in days]
    return Catalogue((*(_with_zones(machine, history) for machine in listed), *older))


def _with_zones(machine: Machine, history: Iterable[Machine]) -> Machine:
    """The newest prices by zone that are no newer than the machine's own."""
    same = (past for past in history if past.instance == machine.instance and _age(past) <= _age(machine))
    newest = max(same, key=_age, default=None)
    return machine if newest is None else replace(machine, zones=newest.zones)


def _by_zone(rows: Iterable[Row], hardware: Mapping[str, Machine]) -> list[Machine]:
    """One machine for the rows of an instance and a day, with the median over its zones."""
    groups: dict[tuple[str, date | None], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.text("instance"), row.day("as_of")), []).append(row)
    return [_quote(group, as_of, hardware.get(instance)) for (instance, as_of), group in groups.items()]


def _quote(rows: list[Row], as_of: date | None, known: Machine | None) -> Machine:
    spot = [row.number("spot_usd_h") for row in rows]
    return replace(
        _machine(rows[0], known),
        on_demand_usd_h=median(row.number("on_demand_usd_h") for row in rows),
        spot_usd_h=median(spot),
        spot_min_usd_h=min(spot),
        spot_max_usd_h=max(spot),
        as_of=as_of,
        zones={row.text("zone"): price for row, price in zip(rows, spot, strict=True) if row.has("zone")},
    )


def _machine(row: Row, known: Machine | None = None) -> Machine:
    """A row as a machine; what it does not say of the hardware is that of a known one."""
    spot = row.number("spot_usd_h")
    cloud = row.text("cloud", known.cloud if known else "own")
    return Machine(
        cloud=cloud,
        instance=known.instance if known else row.text("instance"),
        gpu=row.text("gpu", known.gpu if known else None),
        gpu_count=row.whole("gpu_count", known.gpu_count if known else None),
        gpu_mem_gib=row.number("gpu_mem_gib", known.gpu_mem_gib if known else None),
        vcpus=row.whole("vcpus", known.vcpus if known else 0),
        mem_gib=row.number("mem_gib", known.mem_gib if known else 0.0),
        on_demand_usd_h=row.number("on_demand_usd_h"),
        spot_usd_h=spot,
        spot_min_usd_h=row.number("spot_min_usd_h", spot),
        spot_max_usd_h=row.number("spot_max_usd_h", spot),
        notice_s=row.whole("notice_s", known.notice_s if known else _NOTICE_S.get(cloud, 0)),
        as_of=row.day("as_of"),
        note=row.text("note", ""),
    )


def _own(path: Path, seed: Catalogue) -> list[Machine]:
    """The machines of a user's file."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"the prices {str(path)!r} could not be read: {reason}") from error
    rows = read_rows(text.replace("spot_median_usd_h", "spot_usd_h"), path.name, REQUIRED)
    hardware = {name.lower(): seed.find(name) for name in seed.names}
    known = {row.text("instance"): hardware.get(row.text("instance").lower()) for row in rows}
    for row in rows:
        _check_new(row, known[row.text("instance")])
    return _by_zone(rows, {name: machine for name, machine in known.items() if machine})


def _check_new(row: Row, known: Machine | None) -> None:
    missing = [column for column in _HARDWARE if not row.has(column)]
    if known is None and missing:
        name = row.text("instance")
        raise row.wrong(f"names {name!r}, which the catalogue does not know: it needs {', '.join(missing)} too")


def _overridden(seed: Catalogue, own: list[Machine]) -> Catalogue:
    named = {machine.instance for machine in own}
    return Catalogue((*own, *(machine for machine in seed.machines if machine.instance not in named)))


def _age(machine: Machine) -> date:
    return machine.as_of or date.max


def _day(on: date | str | None) -> date | None:
    if not isinstance(on, str):
        return on
    try:
        return date.fromisoformat(on)
    except ValueError:
        raise UsageError(f"the date is {on!r}: write it as 2026-08-22") from None
