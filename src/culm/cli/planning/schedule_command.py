"""`culm schedule`: draw a schedule, with its makespan and bubble."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from culm.cli import option_values
from culm.cli.error_reporting import report_errors
from culm.errors import UsageError
from culm.schedule import SCHEDULES, generate_plan, render_perfetto, render_svg, render_text, time_plan


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(SCHEDULES)}.")],
    pipelines: Annotated[int, typer.Option(help="D: how many pipelines.")] = 1,
    stages: Annotated[int, typer.Option(help="P: stages of a pipeline.")] = 4,
    micro_batches: Annotated[int, typer.Option(help="M: micro-batches of a step, over all pipelines.")] = 8,
    ranges: Annotated[int, typer.Option(help="Segments of a worker under interleaved.")] = 2,
    times: Annotated[str, typer.Option(help="Durations of F, I, W, R and S.")] = "F=1,I=1,W=1",
    svg_file: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Write a picture.")] = None,
    csv_file: Annotated[str | None, typer.Option("--csv", metavar="FILE", help="Write the plan as a table.")] = None,
    perfetto_file: Annotated[
        str | None, typer.Option("--perfetto", metavar="FILE", help="Write a trace for ui.perfetto.dev.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Draw a schedule: one row for each worker, one column for each unit of time."""
    with report_errors(debug=debug):
        costs = option_values.parse_action_costs(times)
        plan = generate_plan(name, pipelines=pipelines, stages=stages, micro_batches=micro_batches, ranges=ranges)
        timeline = time_plan(plan, costs)
        print(render_text(timeline), end="")
        _write_if_asked(svg_file, lambda: render_svg(timeline))
        _write_if_asked(csv_file, plan.to_csv)
        _write_if_asked(perfetto_file, lambda: json.dumps(render_perfetto(timeline)))


def _write_if_asked(path: str | None, make_text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(make_text(), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
