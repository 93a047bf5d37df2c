"""Charts of nodes, throughput and cost over time, for the first run of each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from culm.market.chart import ChartPanel, Points, column_means, draw_svg
from culm.market.market_trace import HOUR

if TYPE_CHECKING:
    from culm.sim.compare_strategies import StrategyOutcome
    from culm.sim.engine import StrategyRun

COLUMNS = 240


def chart_outcomes(title: str, outcomes: Mapping[str, StrategyOutcome]) -> str:
    """An SVG with three panels; throughput is the mean over each of 240 columns."""
    runs = {name: outcome.runs[0] for name, outcome in outcomes.items()}
    hours = max(run.seconds for run in runs.values()) / HOUR
    nodes = {name: run for name, run in runs.items() if name != "on-demand"} or runs
    first = next(iter(nodes.values()))
    panels = [
        ChartPanel(
            "nodes alive", {"nodes": average_columns(((p.t / HOUR, float(p.nodes)) for p in first.points), hours)}
        ),
        ChartPanel(
            "samples per second", {name: average_columns(sample_rates(run), hours) for name, run in runs.items()}
        ),
        ChartPanel("dollars", {name: _dollar_points(run) for name, run in runs.items()}, slope=True),
    ]
    return draw_svg(title, panels, hours)


def sample_rates(run: StrategyRun) -> Iterable[tuple[float, float]]:
    return ((point.t / HOUR, point.rate) for point in run.points)


def average_columns(points: Iterable[tuple[float, float]], hours: float) -> Points:
    """The mean over each column, as points."""
    columns = column_means([(0.0, 0.0), *points], hours, COLUMNS)
    return [(number * hours / COLUMNS, value) for number, value in enumerate(columns)]


def _dollar_points(run: StrategyRun) -> Points:
    every = max(1, len(run.points) // COLUMNS)
    return [(point.t / HOUR, point.usd) for point in [*run.points[::every], run.points[-1]]]
