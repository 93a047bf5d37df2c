"""A run in the text format of Prometheus. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from culm.observe.facts import Facts

KIND = "text/plain; version=0.0.4; charset=utf-8"


def metrics(run: Facts) -> str:
    """All figures, each with what it means."""
    return "".join(f"{line}\n" for line in _lines(run))


def _lines(run: Facts) -> Iterator[str]:
    labels = f'{{run="{_escaped(run.name)}"}}'
    for name, kind, meaning, value in _figures(run):
        if value is not None:
            yield f"# HELP culm_{name} {meaning}"
            yield f"# TYPE culm_{name} {kind}"
            yield f"culm_{name}{labels} {value:.10g}"
    yield "# HELP culm_state 1 for the state that the run is in."
    yield "# TYPE culm_state gauge"
    for state in ("waiting", "running", "done", "failed", "cut off"):
        yield f'culm_state{{run="{_escaped(run.name)}",state="{state}"}} {int(run.state == state)}'


def _figures(run: Facts) -> Iterator[tuple[str, str, str, float | None]]:
    yield "steps_total", "counter", "Steps (epochs of a graph run) that are committed.", run.steps
    yield "samples_total", "counter", "Samples that were counted.", run.samples
    yield "loss", "gauge", "Of the last step.", run.loss
    yield "evaluation_loss", "gauge", "Of the last evaluation.", run.evaluation
    yield "goodput_samples_per_second", "gauge", "Samples over all time since the first step began.", run.goodput
    yield "pace_samples_per_second", "gauge", "Samples a second over the last steps.", run.pace
    yield "preemptions_total", "counter", "Nodes that were lost or left.", run.preemptions
    yield "recoveries_total", "counter", "Losses that the run went on from.", len(run.recoveries)
    yield "recovering_seconds_total", "counter", "Seconds that recoveries took.", run.recovering_s
    yield "nodes", "gauge", "Nodes that are there.", run.there
    once = None if run.once is None else int(run.once)
    yield "every_sample_once", "gauge", "1: every sample was counted once.", once


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
