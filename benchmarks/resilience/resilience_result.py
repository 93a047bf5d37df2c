"""The JSON of `culm bench resilience`, and its table."""

from __future__ import annotations

from typing import Any, TypedDict

from benchmarks.pipeline.pipeline_bench import describe_machine
from benchmarks.resilience.integrity_cost import IntegrityShare
from benchmarks.resilience.preemption_goodput import GridCell
from benchmarks.resilience.strategy_overhead import StrategyOverhead
from rich.table import Table


class StrategyCost(TypedDict):
    """The cost of one strategy; None: not measured, or not applicable."""

    vs_undisturbed: float | None
    """Goodput under losses divided by that of the failure-free run."""
    vs_checkpoint: float | None
    """... and by that of the tuned checkpoint baseline under the same losses."""
    pause_steps: float | None
    pause_bound_steps: float | None
    pause_s: float | None
    pause_within: float | None
    """The share of losses whose pause is at most the bound plus a tenth of a step plus half a second."""
    pause_step_s: float | None
    bubble_share: float | None
    preemptions: int | None
    notice_steps: float
    overhead: float | None
    overhead_ci: list[float] | None
    real: StrategyOverhead | None
    """All measurements with real compute."""


class GoodputResult(TypedDict):
    """Goodput under preemptions."""

    scene: dict[str, Any]
    checkpoint: dict[str, Any]
    """The best variant of the baseline."""
    strategies: dict[str, dict[str, Any]]
    """The keys of `StrategyCost` that this part measures."""


class RealComputeResult(TypedDict):
    """Measurements with real compute under losses."""

    losses: GoodputResult
    pause: dict[str, float | None]
    """Pauses of `reroute`."""
    bamboo: dict[str, Any]


class ResilienceResult(TypedDict):
    """The JSON of the bench. None or empty: that part was not requested."""

    strategies: dict[str, StrategyCost]
    detect_ms: dict[str, float | None]
    compute: str
    overhead_compute: str
    scene: dict[str, Any]
    checkpoint: dict[str, Any]
    grid: list[GridCell]
    bamboo: dict[str, Any] | None
    real: RealComputeResult | None
    """Also None if there are fewer cores than workers."""
    integrity: dict[str, IntegrityShare]
    """By cost: its share of a step with real compute."""
    kills: dict[str, int]
    cores: int
    workers: int
    lanes: int
    """Number of runs with emulated compute at the same time."""


def empty_cost() -> StrategyCost:
    """A cost with nothing measured yet."""
    known: dict[str, Any] = dict.fromkeys(StrategyCost.__annotations__)
    return StrategyCost(**{**known, "notice_steps": 0.0})  # type: ignore[typeddict-item]


def render_table(result: ResilienceResult) -> Table:
    """The figures as a table."""
    scenario = result["scene"]
    title = "a node lost every {loss_every_steps:g} steps, back after {back_after_steps:g}"
    table = Table(
        title=title.format(**scenario) if scenario else None,
        caption=_caption(result),
    )
    table.add_column("strategy")
    for name in ("of failure-free", "of checkpoint", "pause", "bound", "overhead", "95 %"):
        table.add_column(name, justify="right")
    for name, cost in result["strategies"].items():
        table.add_row(name, *_cost_cells(cost))
    return table


def _caption(result: ResilienceResult) -> str:
    detect = result["detect_ms"]["median"]
    parts = [
        "{pipelines} x {stages} nodes, compute emulated, steps of {step_s:.2f} s; overhead with real compute".format(
            **result["scene"]
        ),
        f"detected after {detect:.0f} ms (median)" if detect is not None else "",
        _integrity_phrase(result["integrity"]),
        describe_machine(result["cores"], result["workers"]),
    ]
    if result["bamboo"] is not None:
        parts.insert(1, "{ratio:.2f} times a checkpoint with Bamboo's costs".format(**result["bamboo"]))
    return "; ".join(filter(None, parts))


def _integrity_phrase(costs: dict[str, IntegrityShare]) -> str:
    shares = [f"{name} {found['share']:.2%}" for name, found in costs.items()]
    return f"integrity, share of a step: {', '.join(shares)}" if shares else ""


def _cost_cells(cost: StrategyCost) -> list[str]:
    interval = cost["overhead_ci"]
    return [
        _format_or_dash(cost["vs_undisturbed"], "{:.0%}"),
        _format_or_dash(cost["vs_checkpoint"], "{:.2f} x"),
        _format_or_dash(cost["pause_steps"], "{:.2f} steps"),
        _format_or_dash(cost["pause_bound_steps"], "{:.2f} steps"),
        _format_or_dash(cost["overhead"], "{:+.1%}"),
        "-" if interval is None else f"{interval[0]:+.1%} to {interval[1]:+.1%}",
    ]


def _format_or_dash(value: float | None, template: str) -> str:
    return "-" if value is None else template.format(value)
