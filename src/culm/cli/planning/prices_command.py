"""`culm prices`: list and compare the prices of instances, and read new ones from a SkyPilot catalogue."""

from __future__ import annotations

import json
import os
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from culm.cli.error_reporting import print_error, report_errors
from culm.cli.planning.price_warnings import current_date
from culm.cli.progress_display import make_console
from culm.errors import UsageError
from culm.market.catalogue import MAX_AGE_DAYS, load_catalogue, parse_date
from culm.market.price_listing import PriceFilter, list_prices, price_marks
from culm.market.skypilot_prices import CLOUDS, format_prices, guess_cloud, read_skypilot, rows_to_keep
from culm.plan.model.accelerators import ACCELERATORS, GIB, INSTANCE_GBIT_PER_S

if TYPE_CHECKING:
    from culm.market.catalogue import PricedInstance

app = typer.Typer(rich_markup_mode=None, help="Prices of instances: list and compare them, or read new ones.")

_MAX_DOWNLOAD_BYTES = 64 * 2**20
_DOWNLOAD_TIMEOUT_S = 60


@app.callback(invoke_without_command=True)
def prices(
    context: typer.Context,
    cloud: Annotated[str | None, typer.Option(help="Only this cloud: aws, gcp or azure.")] = None,
    instance: Annotated[str | None, typer.Option(help="Only instances with this name, part of it, or p5*.")] = None,
    accelerator: Annotated[str | None, typer.Option(help="Only instances with this accelerator.")] = None,
    zone: Annotated[
        str | None, typer.Option("--zone", "--region", help="Only spot prices of this zone or region.")
    ] = None,
    max_price: Annotated[float | None, typer.Option(min=0, help="At most this many dollars per hour.")] = None,
    catalogue: Annotated[Path | None, typer.Option("--prices", metavar="CSV", help="Your own prices.")] = None,
    on: Annotated[str | None, typer.Option(metavar="DATE", help="Prices of a day, such as 2022-06-30.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """List instances by the price of a GPU hour, with spot discount, zone spread, date and source."""
    if context.invoked_subcommand is not None:
        return
    with report_errors(debug=debug):
        if cloud is not None and cloud.lower() not in {*CLOUDS, "own"}:
            raise UsageError(f"--cloud is {cloud!r}: use one of {', '.join(CLOUDS)}")
        wanted = PriceFilter(cloud=cloud, instance=instance, accelerator=accelerator, zone=zone, max_usd_h=max_price)
        day = parse_date(on)
        found = list_prices(load_catalogue(catalogue), wanted, on=day)
        today = day or current_date()
        if json_:
            print(json.dumps({"prices": [_as_json(machine, today) for machine in found], "today": str(today)}))
        else:
            _print_table(found, today)


@app.command()
def update(
    source: Annotated[str, typer.Argument(metavar="FILE|URL", help="A vms.csv of the SkyPilot catalogue.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: ~/.config/culm/prices.csv.")] = None,
    cloud: Annotated[str | None, typer.Option(help="aws, gcp or azure; default: as the address says.")] = None,
    region: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Regions to read; default: US; repeatable.")
    ] = None,
    dated: Annotated[
        str | None, typer.Option("--date", help="Date of the prices; default: the file's date, or today for a URL.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Read prices from a SkyPilot catalogue into a CSV file for --prices. Instances it names are replaced there."""
    with report_errors(debug=debug):
        text, file_date = _fetch(source)
        name = cloud.lower() if cloud else guess_cloud(text, source)
        if name not in CLOUDS:
            raise UsageError(f"--cloud is {cloud!r}: use one of {', '.join(CLOUDS)}")
        gib = {device.name: device.memory / GIB for device in ACCELERATORS.values()}
        seed = load_catalogue()
        read = read_skypilot(text, source, cloud=name, catalogue=seed, accelerator_gib=gib, regions=tuple(region or ()))
        if not read.prices:
            raise UsageError(
                f"{source} has no price of an instance with a known accelerator in these regions: give --region '*'"
            )
        target = out or default_price_file()
        if target.is_file():
            load_catalogue(target)
        kept = rows_to_keep(_read_text(target), target.name, read.instances) if target.is_file() else []
        day = parse_date(dated) or file_date
        _write(target, format_prices(read, on=day, source=f"SkyPilot catalogue: {source}", kept=kept))
        for problem in read.problems:
            print_error(problem)
        summary = {
            "file": str(target),
            "cloud": name,
            "date": str(day),
            "instances": len(read.instances),
            "rows": len(read.prices),
            "skipped": read.skipped,
            "kept_rows": len(kept),
            "problems": read.problems,
        }
        if json_:
            print(json.dumps(summary))
        else:
            print(
                f"{len(read.prices)} prices of {len(read.instances)} {name} instances, as of {day}, are in {target}; "
                f"{read.skipped} rows skipped (other regions, no accelerator, no price); use it with --prices {target}"
            )


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


def _print_table(found: list[PricedInstance], today: date) -> None:
    sources = {source: str(n) for n, source in enumerate(dict.fromkeys(machine.source for machine in found), 1)}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    for name in ("instance", "GPUs"):
        table.add_column(name, no_wrap=True)
    for name in ("$/h", "spot", "$/GPU-h", "spot", "off", "spread"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("date", "source"):
        table.add_column(name, no_wrap=True)
    table.add_column("marks", overflow="fold")
    for machine in found:
        table.add_row(*_table_cells(machine), sources[machine.source], ", ".join(price_marks(machine, today)))
    make_console(stderr=False).print(table)
    print("off: spot discount; spread: dearest zone over cheapest; spot: median of the zones")
    print(f"old: more than {MAX_AGE_DAYS} days before {today}; sources:")
    for source, number in sources.items():
        print(f"  {number}  {source}")


def _table_cells(machine: PricedInstance) -> tuple[str, ...]:
    return (
        machine.instance,
        f"{machine.gpu_count}x{machine.gpu}" if machine.gpu_count else "-",
        _dollars(machine.on_demand_usd_h),
        _dollars(machine.spot_usd_h),
        _dollars(machine.per_gpu(machine.on_demand_usd_h)),
        _dollars(machine.per_gpu(machine.spot_usd_h)),
        "-" if machine.discount is None else f"{machine.discount:.0%}",
        "-" if machine.zone_spread is None else f"{machine.zone_spread:.2f}x",
        str(machine.as_of or "-"),
    )


def _dollars(price: float | None) -> str:
    return "-" if price is None else f"{price:.4g}" if price < 1000 else f"{price:.0f}"


def _as_json(machine: PricedInstance, today: date) -> dict[str, Any]:
    device = ACCELERATORS.get(machine.gpu)
    return {
        "cloud": machine.cloud,
        "instance": machine.instance,
        "accelerator": machine.gpu if machine.gpu_count else None,
        "accelerators": machine.gpu_count,
        "accelerator_memory_gib": machine.gpu_mem_gib,
        "tensor_tflops": device.half_precision / 1e12 if device else None,
        "bf16": device.has_bf16 if device else None,
        "nvlink_gb_s": device.nvlink / 1e9 if device else None,
        "network_gbit_s": INSTANCE_GBIT_PER_S.get(machine.instance),
        "vcpus": machine.vcpus,
        "memory_gib": machine.mem_gib,
        "on_demand_usd_h": machine.on_demand_usd_h,
        "spot_usd_h": machine.spot_usd_h,
        "on_demand_usd_per_gpu_h": machine.per_gpu(machine.on_demand_usd_h),
        "spot_usd_per_gpu_h": machine.per_gpu(machine.spot_usd_h),
        "discount": machine.discount,
        "spot_min_usd_h": machine.spot_min_usd_h,
        "spot_max_usd_h": machine.spot_max_usd_h,
        "zone_spread": machine.zone_spread,
        "zones": dict(machine.zone_prices),
        "notice_s": machine.notice_s,
        "date": str(machine.as_of) if machine.as_of else None,
        "source": machine.source,
        "marks": list(price_marks(machine, today)),
        "note": machine.note,
    }
