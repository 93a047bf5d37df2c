"""Reads the price catalogues that SkyPilot publishes (vms.csv) and writes them as a price CSV of culm.

A catalogue has one row for each instance and zone, with the columns InstanceType, AcceleratorName, AcceleratorCount,
vCPUs, MemoryGiB, GpuInfo, Price, SpotPrice, Region and, but for Azure, AvailabilityZone. In the catalogue of Google
Cloud, machines and accelerators have separate rows: their prices are added up for the combinations that culm knows,
such as a3-megagpu-8g+8xH100.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from typing import TYPE_CHECKING, NamedTuple

from culm.errors import UsageError
from culm.market.csv_rows import CsvRow, read_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from culm.market.catalogue import PriceCatalogue, PricedInstance

CLOUDS = ("aws", "gcp", "azure")
US_REGIONS = {"aws": ("us-*",), "gcp": ("us-*",), "azure": ("*us", "*us[0-9]")}
"""The regions that are read unless others are given: those of the catalogue in the package."""
MAX_PROBLEMS_PER_KIND = 5
"""Further rows with the same problem are counted only."""

_REQUIRED = ("instancetype", "price", "spotprice", "region")
_KNOWN = {
    *_REQUIRED, "acceleratorname", "acceleratorcount", "vcpus", "memorygib", "gpuinfo", "availabilityzone",
    "generation", "arch", "devicememorygib",
}  # fmt: skip
_ACCELERATOR_ALIASES = {"H100-MEGA": "H100", "H100-80GB": "H100", "H100-SXM": "H100", "H200-SXM": "H200"}
_COLUMNS = (
    "cloud", "instance", "gpu", "gpu_count", "gpu_mem_gib", "vcpus", "mem_gib", "zone", "on_demand_usd_h", "spot_usd_h",
    "date", "source",
)  # fmt: skip


class Hardware(NamedTuple):
    """What a price row says about the instance besides the price."""

    gpu: str
    gpu_count: int
    gpu_mem_gib: float
    vcpus: int
    mem_gib: float


class ZonePrice(NamedTuple):
    """The prices of an instance in one zone; None: not known."""

    instance: str
    zone: str
    on_demand: float | None
    spot: float | None
    hardware: Hardware


@dataclass
class SkyPilotPrices:
    """What was read: prices, and a sentence with its line for everything that was not understood."""

    cloud: str
    prices: list[ZonePrice] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    skipped: int = 0
    """Rows without an accelerator, of other regions, and of instances without a price."""

    @property
    def instances(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(price.instance for price in self.prices))


def guess_cloud(text: str, source: str) -> str:
    """The cloud of a catalogue, by its address or its instances. Raises UsageError if neither tells."""
    named = [cloud for cloud in CLOUDS if cloud in re.split(r"[^a-z]+", source.lower())]
    if len(named) == 1:
        return named[0]
    if "Standard_N" in text:
        return "azure"
    if re.search(r"^[a-z0-9-]+\.[a-z0-9]*(large|metal)", text, re.MULTILINE):
        return "aws"
    if re.search(r"^[a-z][0-9][a-z]?-[a-z]+-", text, re.MULTILINE):
        return "gcp"
    raise UsageError(f"{source} does not tell its cloud: give it with --cloud {'|'.join(CLOUDS)}")


def read_skypilot(
    text: str,
    source: str,
    *,
    cloud: str,
    catalogue: PriceCatalogue,
    accelerator_gib: Mapping[str, float],
    regions: Collection[str] = (),
) -> SkyPilotPrices:
    """Read a catalogue. `accelerator_gib` has the memory of the accelerators that can be planned with.

    Rows that cannot be used are reported with their line and left out. Raises UsageError if the file is no catalogue.
    """
    rows = read_rows(text, source, _REQUIRED)
    reader = _Reader(cloud, catalogue, accelerator_gib, regions or US_REGIONS[cloud])
    if rows:
        reader.check_columns(rows[0])
    for row in rows:
        reader.read(row)
    return reader.finish()


class _Reader:
    """Collects prices and problems row by row."""

    def __init__(
        self, cloud: str, catalogue: PriceCatalogue, accelerator_gib: Mapping[str, float], regions: Collection[str]
    ) -> None:
        self._found = SkyPilotPrices(cloud)
        self._known = {name.lower(): catalogue.find(name) for name in catalogue.names}
        self._accelerator_gib = {name.lower(): (name, gib) for name, gib in accelerator_gib.items()}
        self._regions = regions
        self._kinds: Counter[str] = Counter()
        self._machines: dict[tuple[str, str], CsvRow] = {}
        self._accelerators: dict[tuple[str, int, str], CsvRow] = {}

    def check_columns(self, row: CsvRow) -> None:
        for column in sorted(set(row.cells) - _KNOWN):
            self._found.problems.append(f"{row.source}, line 1, has the unknown column {column!r}: it is ignored")

    def read(self, row: CsvRow) -> None:
        if not any(fnmatch(row.get_text("region", ""), pattern) for pattern in self._regions):
            self._found.skipped += 1
            return
        try:
            self._read_priced(row)
        except UsageError as error:
            self._report("invalid", str(error))

    def _read_priced(self, row: CsvRow) -> None:
        prices = (row.get_optional_number("price"), row.get_optional_number("spotprice"))
        if prices == (None, None):
            self._found.skipped += 1
        elif self._found.cloud == "gcp":
            self._keep_part(row)
        else:
            hardware = self._hardware(row)
            if hardware is None:
                self._found.skipped += 1
            else:
                name = row.get_text("instancetype")
                known = self._known.get(name.lower())
                self._add(known.instance if known else name, row, *prices, hardware)

    def _hardware(self, row: CsvRow) -> Hardware | None:
        """The hardware of a row; None for a machine without an accelerator that culm does not know."""
        name, known = row.get_text("instancetype"), self._known.get(row.get_text("instancetype").lower())
        if known is not None:
            count = row.get_number("acceleratorcount", 0.0)
            if count != known.gpu_count:
                self._report(
                    f"count of {name}",
                    f"{row.source}, line {row.line}, has {count:g} accelerators for {name}: {known.gpu_count} are used",
                    most=1,
                )
            return _hardware_of(known)
        if not row.has_value("acceleratorname"):
            return None
        gpu = _ACCELERATOR_ALIASES.get(row.get_text("acceleratorname"), row.get_text("acceleratorname"))
        if gpu.lower() not in self._accelerator_gib:
            raise row.error(f"has the accelerator {gpu!r}, for which culm has no figures: the row is left out")
        spelled, gib = self._accelerator_gib[gpu.lower()]
        listed = re.search(r"'SizeInMiB': ([0-9]+)", row.get_text("gpuinfo", ""))
        return Hardware(
            gpu=spelled,
            gpu_count=row.get_int("acceleratorcount"),
            gpu_mem_gib=int(listed[1]) / 1024 if listed else gib,
            vcpus=int(row.get_number("vcpus", 0.0)),
            mem_gib=row.get_number("memorygib", 0.0),
        )

    def _keep_part(self, row: CsvRow) -> None:
        """Keep a machine or an accelerator of Google Cloud until all rows are read."""
        zone = _zone(row)
        if row.has_value("instancetype"):
            self._machines[row.get_text("instancetype").lower(), zone] = row
        elif row.get_text("acceleratorname", "").startswith("tpu"):
            self._found.skipped += 1
        else:
            key = (row.get_text("acceleratorname").lower(), row.get_int("acceleratorcount"), zone)
            self._accelerators[key] = row

    def finish(self) -> SkyPilotPrices:
        """Add up the parts of Google Cloud and count the problems that are not listed."""
        for machine in self._known.values():
            if machine.cloud == "gcp" == self._found.cloud:
                self._combine(machine)
        for kind, count in self._kinds.items():
            if kind == "invalid" and count > MAX_PROBLEMS_PER_KIND:
                self._found.problems.append(f"{count - MAX_PROBLEMS_PER_KIND} more rows are left out for such reasons")
        return self._found

    def _combine(self, machine: PricedInstance) -> None:
        base = machine.instance.partition("+")[0].lower()
        names = {machine.gpu.lower(), *(["h100-mega"] if "megagpu" in base else [])}
        for (name, zone), row in self._machines.items():
            parts = [self._accelerators.get((gpu, machine.gpu_count, zone)) for gpu in sorted(names, reverse=True)]
            accelerator = next((part for part in parts if part is not None), None)
            if name == base and accelerator is not None:
                on_demand, spot = (_sum_prices(row, accelerator, column) for column in ("price", "spotprice"))
                self._add(machine.instance, row, on_demand, spot, _hardware_of(machine))

    def _add(self, instance: str, row: CsvRow, on_demand: float | None, spot: float | None, hardware: Hardware) -> None:
        self._found.prices.append(ZonePrice(instance, _zone(row), on_demand, spot, hardware))

    def _report(self, kind: str, sentence: str, most: int = MAX_PROBLEMS_PER_KIND) -> None:
        self._kinds[kind] += 1
        if self._kinds[kind] <= most:
            self._found.problems.append(sentence)


def _hardware_of(machine: PricedInstance) -> Hardware:
    return Hardware(machine.gpu, machine.gpu_count, machine.gpu_mem_gib, machine.vcpus, machine.mem_gib)


def _zone(row: CsvRow) -> str:
    """The zone, or the region where the cloud has one price for all its zones."""
    return row.get_text("availabilityzone", row.get_text("region"))


def _sum_prices(machine: CsvRow, accelerator: CsvRow, column: str) -> float | None:
    parts = (machine.get_optional_number(column), accelerator.get_optional_number(column))
    return None if parts[0] is None or parts[1] is None else round(parts[0] + parts[1], 6)


def format_prices(found: SkyPilotPrices, *, on: date, source: str, kept: Sequence[Mapping[str, str]] = ()) -> str:
    """The prices as a CSV for --prices, after the rows of an earlier file that are `kept`."""
    out = io.StringIO()
    columns = [*_COLUMNS, *dict.fromkeys(column for row in kept for column in row if column not in _COLUMNS)]
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    writer.writerows(_as_cells(found.cloud, price, on, source) for price in found.prices)
    return out.getvalue()


def rows_to_keep(text: str, name: str, replaced: Iterable[str]) -> list[dict[str, str]]:
    """The rows of an earlier price file whose instances are not replaced. Raises UsageError for any other file."""
    new = {instance.lower() for instance in replaced}
    rows = read_rows(text, name, ("instance", "on_demand_usd_h", "spot_usd_h"))
    return [dict(row.cells) for row in rows if row.get_text("instance").lower() not in new]


def _as_cells(cloud: str, price: ZonePrice, on: date, source: str) -> dict[str, object]:
    return {
        "cloud": cloud,
        "instance": price.instance,
        **price.hardware._asdict(),
        "zone": price.zone,
        "on_demand_usd_h": "" if price.on_demand is None else price.on_demand,
        "spot_usd_h": "" if price.spot is None else price.spot,
        "date": on.isoformat(),
        "source": source,
    }
