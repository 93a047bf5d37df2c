"""Nodes, throughput and cost over time, of the first run of each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from culm.market.chart import Panel, Points, means, svg
from culm.market.trace import HOUR

if TYPE_CHECKING:
    from culm.sim.engine import Run
    from culm.sim.study import Outcome

COLUMNS = 240


def picture(title: str, outcomes: Mapping[str, Outcome]) -> str:
    """An SVG with three panels; throughput is the mean over each 240th of the time."""
    runs = {name: outcome.runs[0] for name, outcome in outcomes.items()}
    hours = max(run.seconds for run in runs.values()) / HOUR
    nodes = {name: run for name, run in runs.items() if name != "on-demand"} or runs
    first = next(iter(nodes.values()))
    panels = [
        Panel("nodes alive", {"nodes": thinned(((p.t / HOUR, float(p.nodes)) for p in first.points), hours)}),
        Panel("samples per second", {name: thinned(rates(run), hours) for name, run in runs.items()}),
        Panel("dollars", {name: _paid(run) for name, run in runs.items()}, slope=True),
    ]
    return svg(title, panels, hours)


def rates(run: Run) -> Iterable[tuple[float, float]]:
    return ((point.t / HOUR, point.rate) for point in run.points)


def thinned(points: Iterable[tuple[float, float]], hours: float) -> Points:
    """The mean over each column, as points."""
    columns = means([(0.0, 0.0), *points], hours, COLUMNS)
    return [(number * hours / COLUMNS, value) for number, value in enumerate(columns)]


def _paid(run: Run) -> Points:
    every = max(1, len(run.points) // COLUMNS)
    return [(point.t / HOUR, point.usd) for point in [*run.points[::every], run.points[-1]]]
