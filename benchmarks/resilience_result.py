"""The JSON of `culm bench resilience`, and the table that people get of it."""

from __future__ import annotations

from typing import Any, TypedDict

from rich.table import Table

from benchmarks.pipeline import setting
from benchmarks.resilience_losses import Cell
from benchmarks.resilience_overhead import Overhead


class Cost(TypedDict):
    """What one strategy costs; None: not measured, or there is nothing to measure."""

    vs_undisturbed: float | None
    """Goodput under losses over that of the undisturbed run."""
    vs_checkpoint: float | None
    """... and over that of the tuned checkpoint baseline under the same losses."""
    pause_steps: float | None
    pause_bound_steps: float | None
    pause_s: float | None
    pause_within: float | None
    """The share of losses with a pause of no more than the bound, a tenth of a step and half a second."""
    pause_step_s: float | None
    bubble_share: float | None
    preemptions: int | None
    notice_steps: float
    overhead: float | None
    overhead_ci: list[float] | None
    real: Overhead | None
    """All that was measured with real compute."""


class Losses(TypedDict):
    """Goodput under losses."""

    scene: dict[str, Any]
    checkpoint: dict[str, Any]
    """The baseline at its best."""
    strategies: dict[str, dict[str, Any]]
    """Those keys of `Cost` that come of it."""


class Real(TypedDict):
    """What was measured with real compute under losses."""

    losses: Losses
    pause: dict[str, float | None]
    """Of `reroute`."""
    bamboo: dict[str, Any]


class Result(TypedDict):
    """The JSON of the bench. None, or empty: that part was not asked for."""

    strategies: dict[str, Cost]
    detect_ms: dict[str, float | None]
    compute: str
    overhead_compute: str
    scene: dict[str, Any]
    checkpoint: dict[str, Any]
    grid: list[Cell]
    bamboo: dict[str, Any] | None
    real: Real | None
    """None as well where there are fewer cores than workers."""
    kills: dict[str, int]
    cores: int
    workers: int
    lanes: int
    """Runs with emulated compute that went on side by side."""


def unmeasured() -> Cost:
    """Nothing measured yet."""
    known: dict[str, Any] = dict.fromkeys(Cost.__annotations__)
    return Cost(**{**known, "notice_steps": 0.0})  # type: ignore[typeddict-item]


def table(result: Result) -> Table:
    """The figures for people."""
    scene = result["scene"]
    told = "a node lost every {loss_every_steps:g} steps, back after {back_after_steps:g}"
    made = Table(
        title=told.format(**scene) if scene else None,
        caption=_caption(result),
    )
    made.add_column("strategy")
    for name in ("of undisturbed", "of checkpoint", "pause", "bound", "overhead", "95 %"):
        made.add_column(name, justify="right")
    for name, cost in result["strategies"].items():
        made.add_row(name, *_cells(cost))
    return made


def _caption(result: Result) -> str:
    detect = result["detect_ms"]["median"]
    parts = [
        "{pipelines} x {stages} nodes, compute emulated, steps of {step_s:.2f} s; overhead with real compute".format(
            **result["scene"]
        ),
        f"detected after {detect:.0f} ms (median)" if detect is not None else "",
        setting(result["cores"], result["workers"]),
    ]
    if result["bamboo"] is not None:
        parts.insert(1, "{ratio:.2f} times a checkpoint with Bamboo's costs".format(**result["bamboo"]))
    return "; ".join(filter(None, parts))


def _cells(cost: Cost) -> list[str]:
    interval = cost["overhead_ci"]
    return [
        _or_dash(cost["vs_undisturbed"], "{:.0%}"),
        _or_dash(cost["vs_checkpoint"], "{:.2f} x"),
        _or_dash(cost["pause_steps"], "{:.2f} steps"),
        _or_dash(cost["pause_bound_steps"], "{:.2f} steps"),
        _or_dash(cost["overhead"], "{:+.1%}"),
        "-" if interval is None else f"{interval[0]:+.1%} to {interval[1]:+.1%}",
    ]


def _or_dash(value: float | None, shown: str) -> str:
    return "-" if value is None else shown.format(value)
