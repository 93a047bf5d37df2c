"""`culm schedule`: a schedule as a picture, with its makespan and bubble."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from culm.cli import values
from culm.cli.failing import failing
from culm.errors import UsageError
from culm.schedule import SCHEDULES, generate, grid, perfetto, svg, timing


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(SCHEDULES)}.")],
    pipelines: Annotated[int, typer.Option(help="D: how many pipelines.")] = 1,
    stages: Annotated[int, typer.Option(help="P: stages of a pipeline.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="M: micro-batches of a step, over all pipelines.")] = 8,
    ranges: Annotated[int, typer.Option(help="Segments of a worker under interleaved.")] = 2,
    times: Annotated[str, typer.Option(help="What F, I, W, R and S cost.")] = "F=1,I=1,W=1",
    svg_file: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Write a picture.")] = None,
    csv_file: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the plan as a table.")] = None,
    perfetto_file: Annotated[
        str | None, typer.Option("--perfetto", metavar="FILE", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Show who runs what when: a row for each worker, a column for each unit of time."""
    with failing(debug=debug):
        costs = values.times(times)
        plan = generate(name, pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges)
        timeline = timing(plan, costs)
        print(grid(timeline), end="")
        _write(svg_file, lambda: svg(timeline))
        _write(csv_file, plan.to_csv)
        _write(perfetto_file, lambda: json.dumps(perfetto(timeline)))


def _write(path: str | None, made: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(made(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can not be written: {error.strerror}; name a file in a folder that exists") from None
