"""`culm report`: what runs came to, as one HTML file that opens anywhere."""

from __future__ import annotations

import json
from typing import Annotated, Any

import fsspec
import typer

from culm.cli.failing import failing
from culm.errors import RunError
from culm.observe import page
from culm.observe.facts import Facts, facts, same_weights
from culm.observe.folder import plain
from culm.observe.reading import Contents, Folder
from culm.observe.view import View, of_run, of_runs

NAME = "report.html"


def report(
    folders: Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders of runs, or URLs.")],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Default: report.html in the folder; of several runs: here.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the facts as JSON; no file without --out.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Write a report of a run, or of several beside each other: one HTML file with everything in it."""
    with failing(debug=debug):
        contents = _named([Folder(folder).look() for folder in folders], folders)
        runs = [facts(each) for each in contents]
        place = out or (f"{folders[0].rstrip('/')}/{NAME}" if len(folders) == 1 else NAME)
        if out is not None or not json_:
            _write(place, page.alone(_view(runs, contents)))
        if json_:
            print(json.dumps(plain(as_json(runs))))
        else:
            print(place)


def _view(runs: list[Facts], contents: list[Contents]) -> View:
    return of_run(runs[0], contents[0].trace) if len(runs) == 1 else of_runs(runs)


def _named(contents: list[Contents], folders: list[str]) -> list[Contents]:
    """Runs whose folders have the same name go by the whole path."""
    names = [each.name for each in contents]
    for each, folder in zip(contents, folders, strict=True):
        if names.count(each.name) > 1:
            each.name = folder
    return contents


def as_json(runs: list[Facts]) -> dict[str, Any]:
    """The facts of a report."""
    return {"runs": [_told(run) for run in runs], "same_weights": same_weights(runs)}


def _told(run: Facts) -> dict[str, Any]:
    names = (
        "name", "job", "graph", "state", "why_state", "steps", "asked", "samples", "preemptions", "setup_s", "wall_s",
        "recovering_s", "goodput", "pace", "left_s", "loss", "evaluation", "there", "damaged",
    )  # fmt: skip
    return {
        **{name: getattr(run, name) for name in names},
        "every_sample_once": run.once,
        "proof": run.proof,
        "recoveries": [recovery._asdict() for recovery in run.recoveries],
        "nodes": [stay._asdict() for stay in run.stays],
        "checkpoints": [{"t": t, "step": step, "bytes": size} for t, step, size in run.checkpoints],
        "happened": [happened._asdict() for happened in run.happened],
        "summary": dict(run.summary),
    }


def _write(place: str, text: str) -> None:
    try:
        with fsspec.open(place, "w", encoding="utf-8") as file:
            file.write(text)
    except Exception as error:  # drivers raise what they like
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise RunError(f"the report can not be written to {place}: {why}; give another place with --out") from None
