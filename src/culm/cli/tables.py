"""A run in two tables: what it was set up as, and the ledger at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from culm.cluster.timeouts import derive, table
from culm.schedule import Plan, grid, timing

if TYPE_CHECKING:
    from culm.cluster.setup import Setup


def setup_table(setup: Setup) -> Table:
    """Shape, schedule, the layers of each stage, and why."""
    plan = Plan.from_text(setup.plan)
    first = f" from step {setup.start} on, out of {setup.resume_from}" if setup.resume is not None else ""
    rows = {
        "shape": f"{setup.pipelines} x {setup.stages} (pipelines x stages): {setup.nodes} nodes",
        "schedule": f"{setup.schedule}, {plan.micro_batches} micro-batches a step",
        "layers": stages(setup),
        "strategy": setup.strategy,
        "steps": f"{setup.steps}{first}",
        "why": setup.why,
        **({"timeouts": timeouts(setup)} if setup.survives else {}),
    }
    return facts(rows if setup.out is None else {**rows, "folder": setup.out})


def timeouts(setup: Setup) -> str:
    """The one setting, and what follows from it."""
    slowest = max((part for costs in setup.costs for part in costs), default=0.0)
    (name, seconds, _), *derived = table(derive(setup.suspect_after, slowest_action=slowest))
    return f"{name} {seconds:g} s: " + ", ".join(f"{name} {seconds:.3g}" for name, seconds, _ in derived)


def stages(setup: Setup) -> str:
    """The layers of each stage, first to last: 0-2 | 3-5; under interleaving 0, 2 | 1, 3."""
    spans = [f"{i}" if j - i == 1 else f"{i}-{j - 1}" for i, j in setup.segments]
    return " | ".join(", ".join(spans[stage :: setup.stages]) for stage in range(setup.stages))


def picture(setup: Setup, width: int) -> str:
    """The schedule of a step as a grid with unit costs; empty where it would not fit."""
    drawn = grid(timing(Plan.from_text(setup.plan)))
    return drawn if max(map(len, drawn.splitlines())) <= width else ""


def ledger_table(summary: Mapping[str, Any], out: str | None) -> Table:
    """What the run came to. Every sample is to be counted once, and the table says whether it was."""
    loss = summary["final_loss"]
    rows = {
        "steps": str(summary["steps"]),
        "samples": _samples(summary),
        "wall time": f"{summary['wall_s']:.2f} s, after {summary['start_s']:.2f} s to set the nodes up",
        "goodput": f"{summary['goodput']:.1f} samples/s",
        **_ideal(summary),
        "final loss": "no step was run" if loss is None else f"{loss:.6g}",
        **_evaluation(summary),
        "preemptions": _preemptions(summary),
        **({"skipped steps": str(summary["skipped_steps"])} if summary["skipped_steps"] else {}),
        "weights": f"sha256 {summary['weights_sha256'][:12]}",
        "checkpoints": _checkpoints(summary["checkpoints"]),
        "files": out or "none: keep them with --out",
    }
    return facts(rows)


def _samples(summary: Mapping[str, Any]) -> str:
    lost, duplicated = summary["samples_lost"], summary["samples_duplicated"]
    right = summary["samples"] == summary["samples_expected"] and not lost and not duplicated
    counted = "each counted once" if right else "NOT each counted once"
    counted += f", {summary['samples_redone']} of them run again" if summary.get("samples_redone") else ""
    return (
        f"{summary['samples']}, {counted} (expected {summary['samples_expected']}, "
        f"lost {lost}, duplicated {duplicated})"
    )


def _preemptions(summary: Mapping[str, Any]) -> str:
    """How many were survived, and by what."""
    if not summary["preemptions"]:
        return "none"
    told = [
        f"{listed(found['lost'], 'node')} in step {found['step']} by {found['source']}"
        for found in summary["recoveries"]
    ]
    return f"{summary['preemptions']} survived: {', '.join(told)}"


def listed(numbers: Sequence[int], what: str) -> str:
    """For people: node 3; nodes 1 and 2."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    *most, last = map(str, numbers)
    return f"{what}s {', '.join(most)} and {last}" if most else f"no {what}"


def _ideal(summary: Mapping[str, Any]) -> dict[str, str]:
    """Under a trace: how close it came to losing nothing but the nodes that were not there."""
    if summary.get("of_ideal") is None:
        return {}
    share = f"{summary['capacity_share']:.0%} of the nodes there on average"
    return {"ideal": f"{summary['ideal_goodput']:.1f} samples/s with {share}: reached {summary['of_ideal']:.1%}"}


def _checkpoints(steps: Sequence[int]) -> str:
    return f"{len(steps)} written, the newest of step {steps[-1]}" if steps else "none"


def _evaluation(summary: Mapping[str, Any]) -> dict[str, str]:
    if not summary["evaluations"]:
        return {}
    step, loss = list(summary["evaluations"].items())[-1]
    return {"evaluation": f"loss {loss:.6g} after step {int(step) + 1}"}


def facts(rows: Mapping[str, str]) -> Table:
    """Names and what there is to say of them, a line each."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table
