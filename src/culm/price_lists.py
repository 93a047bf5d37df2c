"""`culm.find_prices` and `culm.update_prices`: prices of instances."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import NamedTuple

from culm.errors import UsageError
from culm.market.catalogue import PricedInstance, load_catalogue, parse_date
from culm.market.price_listing import PriceFilter, list_prices
from culm.market.skypilot_prices import CLOUDS, format_prices, guess_cloud, read_skypilot, rows_to_keep
from culm.plan.model.accelerators import ACCELERATORS, GIB

_MAX_DOWNLOAD_BYTES = 64 * 2**20
_DOWNLOAD_TIMEOUT_S = 60


class PriceUpdate(NamedTuple):
    """What `culm.update_prices` has written."""

    file: str
    cloud: str
    date: str
    instances: int
    rows: int
    skipped: int
    """Rows of other regions, without a known accelerator or without a price."""
    kept_rows: int
    """Rows of other instances that were in the file before."""
    problems: list[str]


def find_prices(
    *,
    cloud: str | None = None,
    instance: str | None = None,
    accelerator: str | None = None,
    zone: str | None = None,
    max_price: float | None = None,
    prices: str | os.PathLike[str] | None = None,
    on: str | None = None,
) -> list[PricedInstance]:
    """Instances by the price of a GPU hour, as `culm prices` lists them; those without a price last.

    `cloud`: aws, gcp or azure. `instance`: a name, part of it, or a pattern such as p5*. `accelerator`: its name.
    `zone`: only spot prices of this zone or region. `max_price`: dollars per hour. `prices`: a CSV file of your own.
    `on`: prices of a day, such as 2022-06-30; default: the newest. Raises UsageError if none matches.
    """
    if cloud is not None and cloud.lower() not in {*CLOUDS, "own"}:
        raise UsageError(f"--cloud is {cloud!r}: use one of {', '.join(CLOUDS)}")
    wanted = PriceFilter(cloud=cloud, instance=instance, accelerator=accelerator, zone=zone, max_usd_h=max_price)
    return list_prices(load_catalogue(None if prices is None else Path(prices)), wanted, on=parse_date(on))


def update_prices(
    source: str,
    *,
    out: str | os.PathLike[str] | None = None,
    cloud: str | None = None,
    regions: Iterable[str] = (),
    on: str | None = None,
) -> PriceUpdate:
    """Read prices from a SkyPilot catalogue into a CSV file, as `culm prices update` does. Instances it names are
    replaced there.

    `source`: a vms.csv, a file or an https:// address. `out`: default: ~/.config/culm/prices.csv. `cloud`: aws, gcp or
    azure; default: as the address says. `regions`: patterns; default: US. `on`: the date of the prices; default: that
    of the file, or today for an address. Raises UsageError if nothing can be read or written.
    """
    text, file_date = _fetch(source)
    name = cloud.lower() if cloud else guess_cloud(text, source)
    if name not in CLOUDS:
        raise UsageError(f"--cloud is {cloud!r}: use one of {', '.join(CLOUDS)}")
    gib = {device.name: device.memory / GIB for device in ACCELERATORS.values()}
    read = read_skypilot(
        text, source, cloud=name, catalogue=load_catalogue(), accelerator_gib=gib, regions=tuple(regions)
    )
    if not read.prices:
        raise UsageError(
            f"{source} has no price of an instance with a known accelerator in these regions: give --region '*'"
        )
    target = default_price_file() if out is None else Path(out)
    if target.is_file():
        load_catalogue(target)
    kept = rows_to_keep(_read_text(target), target.name, read.instances) if target.is_file() else []
    day = parse_date(on) or file_date
    _write(target, format_prices(read, on=day, source=f"SkyPilot catalogue: {source}", kept=kept))
    return PriceUpdate(
        file=str(target),
        cloud=name,
        date=str(day),
        instances=len(read.instances),
        rows=len(read.prices),
        skipped=read.skipped,
        kept_rows=len(kept),
        problems=list(read.problems),
    )


def current_date() -> date:
    """Today, in UTC."""
    return datetime.now(UTC).date()


def default_price_file() -> Path:
    """The user's price file, in the folder that XDG_CONFIG_HOME names. It is read only if --prices names it."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "culm" / "prices.csv"


def _fetch(source: str) -> tuple[str, date]:
    """The text of a file or URL, and the date of its prices if none is given."""
    if "://" in source:
        return _download(source), current_date()
    path = Path(source)
    text = _read_text(path)
    return text, datetime.fromtimestamp(path.stat().st_mtime, UTC).date()


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"the prices {str(path)!r} could not be read: {reason}") from error


def _download(url: str) -> str:
    from urllib.error import URLError
    from urllib.request import urlopen

    if not url.startswith(("https://", "http://")):
        raise UsageError(f"{url!r} is not an address of prices: use https:// or a file")
    try:
        with urlopen(url, timeout=_DOWNLOAD_TIMEOUT_S) as answer:
            raw: bytes = answer.read(_MAX_DOWNLOAD_BYTES + 1)
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(f"{url} could not be read: {reason}; download it and give the file") from error
    if len(raw) > _MAX_DOWNLOAD_BYTES:
        raise UsageError(f"{url} has more than {_MAX_DOWNLOAD_BYTES >> 20} MiB: it is not a price catalogue")
    return raw.decode("utf-8-sig", "replace")


def _write(target: Path, text: str) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}; give another file with --out") from error
