"""A report of runs: their facts, and one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fsspec

from culm.errors import RunError, UsageError
from culm.observe.report import html_page
from culm.observe.report.load_run import RunContents, RunFolderReader
from culm.observe.report.page_layout import PageLayout, layout_comparison, layout_run
from culm.observe.report.report_data import ReportData, build_report_data, same_weights

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class RunReport:
    """The facts of one run, or of several side by side."""

    runs: tuple[ReportData, ...]
    path: str | None
    """The HTML file; None: none was written."""

    @property
    def same_weights(self) -> bool | None:
        """Whether all runs have ended with the same weights; None: one of them has not ended, or there is only one."""
        return same_weights(self.runs)

    def to_fields(self) -> dict[str, Any]:
        """The JSON of `culm report --json`."""
        return {"runs": [_run_fields(run) for run in self.runs], "same_weights": self.same_weights}


def report_runs(folders: Sequence[str], *, out: str | None = None, writes: bool = True) -> RunReport:
    """Read the folders of runs and write a report. `out`: the file; default: report.html in the folder, of several runs
    in the working directory. Raises RunError if it cannot be written."""
    if not folders:
        raise UsageError("no run is named: name the folder of one, or of several to compare")
    contents = _disambiguate_names([RunFolderReader(folder).read() for folder in folders], folders)
    runs = tuple(build_report_data(each) for each in contents)
    if not writes:
        return RunReport(runs, None)
    path = out or (f"{folders[0].rstrip('/')}/{REPORT_FILE}" if len(folders) == 1 else REPORT_FILE)
    _write_report(path, html_page.standalone_page(_layout(runs, contents)))
    return RunReport(runs, path)


def _layout(runs: Sequence[ReportData], contents: Sequence[RunContents]) -> PageLayout:
    return layout_run(runs[0], contents[0].trace) if len(runs) == 1 else layout_comparison(list(runs))


def _disambiguate_names(contents: list[RunContents], folders: Sequence[str]) -> list[RunContents]:
    """Name runs by their whole path where folder names are equal."""
    names = [each.name for each in contents]
    for each, folder in zip(contents, folders, strict=True):
        if names.count(each.name) > 1:
            each.name = folder
    return contents


def _run_fields(run: ReportData) -> dict[str, Any]:
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


def _write_report(path: str, text: str) -> None:
    try:
        with fsspec.open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except Exception as error:  # fsspec drivers raise errors of their own
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise RunError(f"the report cannot be written to {path}: {why}; give another place with --out") from None
