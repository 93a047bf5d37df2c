"""`culm soak`: a run of real processes under real faults for a long time."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from culm.cli.error_reporting import print_error, report_errors
from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.soak.soak_run import SoakResult


def soak(
    minutes: Annotated[float, typer.Option(help="How long faults are injected.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Chooses the faults and their moments.")] = 0,
    out: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Keep the files of the run and the plot soak.svg here.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to stderr.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Kill and stop the processes of a run of eight nodes, break its storage and flip bits; check what it has learned,
    and that its processes do not grow."""
    with report_errors(debug=debug):
        if not 0 < minutes <= 7 * 24 * 60:
            raise UsageError(f"--minutes is {minutes:g}: use more than 0 and at most {7 * 24 * 60}")
        folder, kept = _folder(out)
        try:
            result = _run(60 * minutes, seed, folder)
            plot = None if kept is None else _write_plot(result, kept)
        finally:
            if kept is None:
                shutil.rmtree(folder, ignore_errors=True)
        fields = result.to_fields() | {"plot": None if plot is None else str(plot)}
        if json_:
            print(json.dumps(fields))
        else:
            Console().print(_table(fields))
        for problem in result.problems:
            print_error(problem)
        if result.problems:
            raise typer.Exit(1)


def _folder(out: str | None) -> tuple[Path, Path | None]:
    """The folder for the files of the run, and the one that is kept."""
    if out is None:
        return Path(tempfile.mkdtemp(prefix="culm-soak-")), None
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--out {out!r} exists and is not an empty folder: give another one")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, folder


def _run(seconds: float, seed: int, folder: Path) -> SoakResult:
    from culm.providers.allocator import return_freed_memory
    from culm.soak.soak_run import run_soak

    return_freed_memory()  # as the supervisor of a run does: this process is one, and is judged
    console = Console(stderr=True)
    if not console.is_terminal:
        return run_soak(seconds, seed, folder)
    with console.status("starting") as status:
        return run_soak(seconds, seed, folder, on_progress=status.update)


def _write_plot(result: SoakResult, folder: Path) -> Path:
    from culm.soak.soak_run import plot_samples

    path = folder / "soak.svg"
    title = f"culm soak, {result.seconds / 60:g} minutes, seed {result.seed}, {sum(result.faults.values())} faults"
    path.write_text(plot_samples(result.samples, title))
    return path


def _table(fields: dict[str, Any]) -> Table:
    verdict = "survived: weights are those of the failure-free run" if fields["survived"] else "FAILED"
    table = Table(title=verdict, title_justify="left", box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("steps", f"{fields['steps']} in {fields['seconds']:.0f} s")
    table.add_row("faults", ", ".join(f"{name} {count}" for name, count in fields["faults"].items()))
    for name in ("preemptions", "recoveries", "corruptions", "samples_lost", "samples_duplicated"):
        table.add_row(name.replace("_", " "), str(fields[name]))
    for growth in _fastest_by_role(fields["growth"]):
        table.add_row(
            f"growth of {growth['role']}",
            f"{growth['mb_per_h']:+.2f} MB per hour, observed {growth['observed_s']:.0f} s",
        )
    for growth in fields["total_growth"][:1]:
        roles = ", then ".join(growth["roles"])
        table.add_row("largest growth in total", f"{growth['mb']:+.1f} MB in {growth['observed_s']:.0f} s ({roles})")
    if fields["plot"]:
        table.add_row("plot", fields["plot"])
    return table


def _fastest_by_role(growth: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest growing process of each role."""
    return list({each["role"]: each for each in reversed(growth)}.values())
