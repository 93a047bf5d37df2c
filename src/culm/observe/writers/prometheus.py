"""A run in the text format of Prometheus: for the page's /metrics, and as a file that node_exporter collects."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from culm.observe.writers.writer import RunInfo, Writer

if TYPE_CHECKING:
    from culm.checkpoint import Storage
    from culm.observe.report.report_data import ReportData
    from culm.observe.step_metrics import StepMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TEXTFILE = "metrics.prom"
"""In the run folder: point --collector.textfile.directory of node_exporter there, or link the file."""
_REWRITE_S = 1.0
"""The file is written at most this often, and when the run ends."""
_RECENT_STEPS = 32


@dataclass(kw_only=True)
class PrometheusFigures:
    """The figures that Prometheus sees. None: not known, and left out."""

    run: str
    state: str = "waiting"
    steps: int = 0
    samples: int = 0
    loss: float | None = None
    evaluation: float | None = None
    goodput: float | None = None
    pace: float | None = None
    preemptions: int = 0
    recoveries: int = 0
    recovering_s: float = 0.0
    nodes: int = 0
    every_sample_once: bool | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    """Named values of the last step."""


def prometheus_figures(run: ReportData) -> PrometheusFigures:
    """The figures of a run whose files were read."""
    return PrometheusFigures(
        run=run.name,
        state=run.state,
        steps=run.steps,
        samples=run.samples,
        loss=run.loss,
        evaluation=run.evaluation,
        goodput=run.goodput,
        pace=run.pace,
        preemptions=run.preemptions,
        recoveries=len(run.recoveries),
        recovering_s=run.recovering_s,
        nodes=run.nodes_present,
        every_sample_once=run.every_sample_once,
        values=run.values,
    )


def prometheus_text(figures: PrometheusFigures) -> str:
    """All figures, each with its type and meaning."""
    return "".join(f"{line}\n" for line in _metric_lines(figures))


def _metric_lines(figures: PrometheusFigures) -> Iterator[str]:
    run = f'run="{_escape_label(figures.run)}"'
    for name, kind, meaning, value in _metric_values(figures):
        if value is not None:
            yield from _header_lines(name, kind, meaning)
            yield f"culm_{name}{{{run}}} {value:.10g}"
    yield from _header_lines("state", "gauge", "1 for the state that the run is in.")
    for state in ("waiting", "running", "done", "failed", "cut off"):
        yield f'culm_state{{{run},state="{state}"}} {int(figures.state == state)}'
    if figures.values:
        yield from _header_lines("value", "gauge", "A named value of the last step.")
    for name, value in figures.values.items():
        yield f'culm_value{{{run},name="{_escape_label(name)}"}} {value:.10g}'


def _header_lines(name: str, kind: str, meaning: str) -> Iterator[str]:
    yield f"# HELP culm_{name} {meaning}"
    yield f"# TYPE culm_{name} {kind}"


def _metric_values(run: PrometheusFigures) -> Iterator[tuple[str, str, str, float | None]]:
    yield "steps_total", "counter", "Committed steps (epochs of a graph run).", run.steps
    yield "samples_total", "counter", "Samples that were counted.", run.samples
    yield "loss", "gauge", "Of the last step.", run.loss
    yield "evaluation_loss", "gauge", "Of the last evaluation.", run.evaluation
    yield "goodput_samples_per_second", "gauge", "Samples over all time since the first step began.", run.goodput
    yield "pace_samples_per_second", "gauge", "Samples a second over the last steps.", run.pace
    yield "preemptions_total", "counter", "Nodes that were lost or left.", run.preemptions
    yield "recoveries_total", "counter", "Losses that the run recovered from.", run.recoveries
    yield "recovering_seconds_total", "counter", "Seconds that recoveries took.", run.recovering_s
    yield "nodes", "gauge", "Nodes that are present.", run.nodes
    once = None if run.every_sample_once is None else int(run.every_sample_once)
    yield "every_sample_once", "gauge", "1: every sample was counted exactly once.", once


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class PrometheusWriter(Writer):
    """Keeps `metrics.prom` in the run folder up to date while the run goes on.

    After another node has become the leader, preemptions and recoveries count from zero, as counters may.
    """

    def __init__(self) -> None:
        self._figures = PrometheusFigures(run="")
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        """Time and samples of the last steps."""
        self._ready_at: float | None = None
        self._nodes: set[object] = set()
        self._written_at = float("-inf")
        self._storage: Storage | None = None

    def open(self, run: RunInfo) -> None:
        from culm.checkpoint import Storage  # it imports torch, which pages do without

        assert run.out is not None
        self._storage = Storage(run.out)
        name = run.out.rstrip("/").rpartition("/")[2]
        self._figures = PrometheusFigures(run=name, state="running", steps=run.first_step, samples=run.samples)
        self._write()

    def write_step(self, metrics: StepMetrics) -> None:
        figures = self._figures
        figures.steps, figures.samples = metrics.step + 1, figures.samples + metrics.samples
        figures.loss, figures.values = metrics.loss, metrics.values
        figures.evaluation = figures.evaluation if metrics.eval_loss is None else metrics.eval_loss
        self._recent.append((metrics.t, metrics.samples))
        seconds = metrics.t - self._recent[0][0]
        figures.pace = sum(samples for _, samples in list(self._recent)[1:]) / seconds if seconds > 0 else None
        if self._ready_at is not None and metrics.t > self._ready_at:
            figures.goodput = figures.samples / (metrics.t - self._ready_at)
        lost_or_twice = metrics.samples_lost or metrics.samples_duplicated
        figures.every_sample_once = figures.every_sample_once is not False and not lost_or_twice
        if time.monotonic() - self._written_at >= _REWRITE_S:
            self._write()

    def write_event(self, event: Mapping[str, Any]) -> None:
        figures = self._figures
        match event["kind"]:
            case "node_joined":
                self._nodes.add(event.get("node"))
            case "ready":
                first = not self._recent
                self._ready_at = event["t"] if first else self._ready_at
            case "lost" | "left":
                self._nodes.discard(event.get("node"))
                figures.preemptions += 1
            case "recovered":
                figures.recoveries += 1
                parts = ("detect_ms", "decide_ms", "move_ms", "redo_ms")
                figures.recovering_s += sum(event.get(part) or 0.0 for part in parts) / 1e3
            case "failed":
                figures.state = "failed"
        figures.nodes = len(self._nodes)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._figures.state = "done"
            self._figures.goodput = summary["goodput"]
            self._figures.samples = summary["samples"]
        self._write()

    def _write(self) -> None:
        assert self._storage is not None
        self._storage.write(TEXTFILE, prometheus_text(self._figures).encode())
        self._written_at = time.monotonic()
