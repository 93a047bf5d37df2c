"""`culm profile`: what each layer of a job costs, measured here."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich import box
from rich.table import Table

from culm.cli import values
from culm.cli.display import Display, console_on, display_on
from culm.cli.failing import failing
from culm.errors import UsageError
from culm.job import load, locate, parse
from culm.plan.partition import size

if TYPE_CHECKING:
    from culm.plan import LayerCost, Profile


def profile(
    file: Annotated[str, typer.Argument(metavar="FILE[:function]", help="A Python file with job() -> culm.Job.")],
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; replaces Job.device.")] = None,
    out: Annotated[str | None, typer.Option(metavar="FILE", help="Write the profile, for culm run --profile.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Replaces Job.FIELD.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the profile as JSON, all else on stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Measure the time and memory of each layer of a job, one after the other in this process."""
    with failing(debug=debug):
        overrides = values.assignments(set_ or []) | ({"device": device} if device is not None else {})
        locate(file)
        parse(overrides)
        console = console_on(stderr=json_)
        shown = display_on(console, quiet=False)
        try:
            # With --json stdout is for the profile alone, not for what the job prints.
            with redirect_stdout(sys.stderr if json_ else sys.stdout):
                measured = _measured(file, overrides, shown)
        finally:
            shown.close()
        if out is not None:
            measured.save(out)
        if json_:
            print(msgspec.json.encode(measured).decode())
        else:
            console.print(table(measured))


def _measured(file: str, overrides: dict[str, str], shown: Display) -> Profile:
    shown.told("importing torch and the job", 0, 0)
    from culm.cluster.prepare import look
    from culm.runtime.measure import measure

    job = load(file, overrides)
    _check_device(job.device)
    look(job)  # what does not fit together is a mistake in the job, and said so, before anything is measured
    return measure(job, progress=shown.told)


def _check_device(device: str) -> None:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this machine has no CUDA device that torch can use: use --device cpu")


def table(measured: Profile) -> Table:
    """A row for each layer, and the sums."""
    made = Table(
        title=f"one micro-batch of {measured.micro_batch} on {measured.device}, {measured.threads} threads",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("layer", justify="right")
    made.add_column("name")
    for name in ("F ms", "I ms", "W ms", "S ms", "parameters", "state", "activations", "output"):
        made.add_column(name, justify="right")
    for index, layer in enumerate(measured.layers):
        made.add_row(str(index), layer.name, *_cells([layer]))
    made.add_section()
    made.add_row("", "all", *_cells(list(measured.layers)))
    return made


def _cells(layers: list[LayerCost]) -> list[str]:
    def total(field: str) -> float:
        return float(sum(getattr(layer, field) for layer in layers))

    spent = [f"{1e3 * total(field):.3f}" for field in ("forward_s", "input_s", "weight_s", "step_s")]
    held = [size(int(total(f"{field}_bytes"))) for field in ("parameter", "state", "activation", "output")]
    return spent + held
