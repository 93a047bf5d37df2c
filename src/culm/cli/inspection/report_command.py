"""`culm report`: the results of runs as one self-contained HTML file."""

from __future__ import annotations

import json
from typing import Annotated, Any

import fsspec
import typer

from culm.cli.error_reporting import report_errors
from culm.errors import RunError
from culm.observe.report import html_page
from culm.observe.report.load_run import RunContents, RunFolderReader
from culm.observe.report.page_layout import PageLayout, layout_comparison, layout_run
from culm.observe.report.report_data import ReportData, build_report_data, same_weights
from culm.observe.writers.run_folder import to_plain_json

REPORT_FILE = "report.html"


def report(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders of runs, or URLs.")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Default: report.html in the folder; of several runs: here.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the facts as JSON; no file without --out.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Write a report of one run, or of several side by side: one HTML file with everything in it."""
    with report_errors(debug=debug):
        contents = _disambiguate_names([RunFolderReader(folder).read() for folder in folders], folders)
        runs = [build_report_data(each) for each in contents]
        place = out or (f"{folders[0].rstrip('/')}/{REPORT_FILE}" if len(folders) == 1 else REPORT_FILE)
        if out is not None or not json_:
            _write_report(place, html_page.standalone_page(_layout(runs, contents)))
        if json_:
            print(json.dumps(to_plain_json(report_json(runs))))
        else:
            print(place)


def _layout(runs: list[ReportData], contents: list[RunContents]) -> PageLayout:
    return layout_run(runs[0], contents[0].trace) if len(runs) == 1 else layout_comparison(runs)


def _disambiguate_names(contents: list[RunContents], folders: list[str]) -> list[RunContents]:
    """Name runs by their whole path where folder names are equal."""
    names = [each.name for each in contents]
    for each, folder in zip(contents, folders, strict=True):
        if names.count(each.name) > 1:
            each.name = folder
    return contents


def report_json(runs: list[ReportData]) -> dict[str, Any]:
    """The facts of a report as JSON."""
    return {"runs": [_run_json(run) for run in runs], "same_weights": same_weights(runs)}


def _run_json(run: ReportData) -> dict[str, Any]:
    names = (
        "name", "job", "graph", "state", "why_state", "steps", "samples", "preemptions", "setup_s", "wall_s",
        "recovering_s", "goodput", "pace", "left_s", "loss", "evaluation",
    )  # fmt: skip
    return {
        **{name: getattr(run, name) for name in names},
        "steps_requested": run.steps_requested,
        "nodes_present": run.nodes_present,
        "damaged_lines": run.damaged_lines,
        "values": dict(run.values),
        "every_sample_once": run.every_sample_once,
        "proof": run.proof,
        "recoveries": [recovery._asdict() for recovery in run.recoveries],
        "nodes": [presence._asdict() for presence in run.node_presences],
        "checkpoints": [{"t": t, "step": step, "bytes": size} for t, step, size in run.checkpoints],
        "events": [line._asdict() for line in run.event_lines],
        "summary": dict(run.summary),
    }


def _write_report(place: str, text: str) -> None:
    try:
        with fsspec.open(place, "w", encoding="utf-8") as file:
            file.write(text)
    except Exception as error:  # fsspec drivers raise errors of their own
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise RunError(f"the report cannot be written to {place}: {why}; give another place with --out") from None
