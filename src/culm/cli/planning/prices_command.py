"""`culm prices`: list and compare the prices of instances, and read new ones from a SkyPilot catalogue."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from culm.cli.error_reporting import print_error, report_errors
from culm.cli.progress_display import make_console
from culm.market.catalogue import MAX_AGE_DAYS, parse_date
from culm.market.price_listing import price_marks
from culm.plan.model.accelerators import ACCELERATORS, INSTANCE_GBIT_PER_S
from culm.price_lists import current_date, find_prices, update_prices

if TYPE_CHECKING:
    from culm.market.catalogue import PricedInstance

app = typer.Typer(rich_markup_mode=None, help="Prices of instances: list and compare them, or read new ones.")


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
        found = find_prices(
            cloud=cloud,
            instance=instance,
            accelerator=accelerator,
            zone=zone,
            max_price=max_price,
            prices=catalogue,
            on=on,
        )
        today = parse_date(on) or current_date()
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
        found = update_prices(source, out=out, cloud=cloud, regions=region or (), on=dated)
        for problem in found.problems:
            print_error(problem)
        if json_:
            print(json.dumps(found._asdict()))
        else:
            print(
                f"{found.rows} prices of {found.instances} {found.cloud} instances, as of {found.date}, are in "
                f"{found.file}; {found.skipped} rows skipped (other regions, no accelerator, no price); use it with "
                f"--prices {found.file}"
            )


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
