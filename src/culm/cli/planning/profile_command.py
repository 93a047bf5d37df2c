"""`culm profile`: measure what each layer of a job costs on this machine."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich import box
from rich.table import Table

from culm import job_profile
from culm.cli import option_values
from culm.cli.error_reporting import report_errors
from culm.cli.progress_display import make_console, make_display
from culm.job import find_job_file, parse_overrides
from culm.text_format import format_bytes

if TYPE_CHECKING:
    from culm.plan import LayerCost, Profile


def profile(
    file: Annotated[str, typer.Argument(metavar="FILE[:function]", help="A Python file with job() -> culm.Job.")],
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; replaces Job.device.")] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write the profile, for culm run --profile.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Replaces Job.FIELD.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the profile as JSON; all else goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Measure the time and memory of each layer of a job, one after the other in this process."""
    with report_errors(debug=debug):
        overrides = option_values.parse_assignments(set_ or []) | ({"device": device} if device is not None else {})
        find_job_file(file)
        replaced = parse_overrides(overrides)
        console = make_console(stderr=json_)
        display = make_display(console, quiet=False)
        try:
            # With --json, stdout is only for the profile: output of the job goes to stderr.
            with redirect_stdout(sys.stderr if json_ else sys.stdout):
                measured = job_profile.profile(file, overrides=replaced, progress=display.show_progress)
        finally:
            display.close()
        if out is not None:
            measured.save(out)
        if json_:
            print(msgspec.json.encode(measured).decode())
        else:
            console.print(profile_table(measured))


def profile_table(profile: Profile) -> Table:
    """One row for each layer, and the totals."""
    table = Table(
        title=f"one micro-batch of {profile.micro_batch} on {profile.device}, {profile.threads} threads",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("layer", justify="right")
    table.add_column("name")
    for name in ("F ms", "I ms", "W ms", "S ms", "parameters", "state", "activations", "output"):
        table.add_column(name, justify="right")
    for index, layer in enumerate(profile.layers):
        table.add_row(str(index), layer.name, *_cells([layer]))
    table.add_section()
    table.add_row("", "all", *_cells(list(profile.layers)))
    return table


def _cells(layers: list[LayerCost]) -> list[str]:
    def total(field: str) -> float:
        return float(sum(getattr(layer, field) for layer in layers))

    spent = [f"{1e3 * total(field):.3f}" for field in ("forward_s", "input_s", "weight_s", "step_s")]
    held = [format_bytes(int(total(f"{field}_bytes"))) for field in ("parameter", "state", "activation", "output")]
    return spent + held
