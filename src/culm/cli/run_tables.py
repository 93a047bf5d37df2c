"""Tables of a run: its setup, and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from culm.cluster.run_setup import node_words
from culm.cluster.timeouts import derive_timeouts, timeout_table
from culm.providers.run_events import format_numbered
from culm.schedule import Plan, render_text, time_plan
from culm.text_format import format_bytes

if TYPE_CHECKING:
    from culm.cluster.run_setup import RunSetup


def setup_table(setup: RunSetup) -> Table:
    """Shape, schedule, layers of each stage, strategy and reasons."""
    plan = Plan.from_text(setup.plan)
    first = f" from step {setup.start} on, out of {setup.resume_from}" if setup.resume is not None else ""
    rows = {
        "shape": f"{setup.pipelines} x {setup.stages} (pipelines x stages): {node_words(setup)}",
        "schedule": f"{setup.schedule}, {plan.micro_batches} micro-batches a step",
        "layers": stage_words(setup),
        "strategy": setup.strategy,
        **memory_row(setup),
        "steps": f"{setup.steps}{first}",
        "why": setup.reason,
        **encryption_row(setup),
        **({"timeouts": timeout_words(setup)} if setup.survives_losses else {}),
    }
    return key_value_table(rows if setup.out is None else {**rows, "folder": setup.out})


def memory_row(setup: RunSetup) -> dict[str, str]:
    """What the worker that needs most of each is predicted to need."""
    if not setup.worker_memories:
        return {}
    fullest = max(setup.worker_memories, key=lambda memory: memory.total)
    host = max(setup.worker_memories, key=lambda memory: memory.on_host)
    what = "frames, sums and activations of shadows" if host.off_loaded else "frames and sums"
    on_host = f"; in host memory stage {host.stage}, {format_bytes(host.on_host)} of {what}"
    return {
        "memory": f"stage {fullest.stage} needs most, about {format_bytes(fullest.total)}"
        + (on_host if host.on_host else "")
    }


def encryption_row(setup: RunSetup) -> dict[str, str]:
    """Whether connections are encrypted, for a run on several machines or if the user said so."""
    if setup.encrypt == "auto" and not (setup.config.get("etcd") or setup.config.get("join")):
        return {}
    words = {
        "auto": "connections between machines are encrypted; gradient sums use them instead of Gloo",
        "on": "all connections are encrypted; gradient sums use them instead of Gloo",
        "off": "OFF: everyone in the network can read and change activations, gradients and weights on their way",
    }
    return {"encryption": words[setup.encrypt]}


def timeout_words(setup: RunSetup) -> str:
    """`suspect_after` and the timeouts that are derived from it."""
    slowest = max((part for costs in setup.costs for part in costs), default=0.0)
    times = derive_timeouts(setup.suspect_after, slowest_action=slowest, blocked_after=setup.blocked_after)
    (name, seconds, _), *derived = timeout_table(times)
    return f"{name} {seconds:g} s: " + ", ".join(f"{name} {seconds:.3g}" for name, seconds, _ in derived)


def stage_words(setup: RunSetup) -> str:
    """The layers of each stage, first to last: 0-2 | 3-5; under interleaving 0, 2 | 1, 3."""
    spans = [f"{i}" if j - i == 1 else f"{i}-{j - 1}" for i, j in setup.segments]
    return " | ".join(", ".join(spans[stage :: setup.stages]) for stage in range(setup.stages))


def schedule_grid(setup: RunSetup, width: int) -> str:
    """The schedule of a step as a grid with unit costs; empty if it is wider than `width`."""
    grid = render_text(time_plan(Plan.from_text(setup.plan)))
    return grid if max(map(len, grid.splitlines())) <= width else ""


def summary_table(summary: Mapping[str, Any], out: str | None) -> Table:
    """The summary of a run. It says whether every sample was counted once."""
    loss = summary["final_loss"]
    rows = {
        "steps": str(summary["steps"]),
        "samples": _sample_words(summary),
        "wall time": f"{summary['wall_s']:.2f} s, after {summary['start_s']:.2f} s to set the nodes up",
        "goodput": f"{summary['goodput']:.1f} samples/s",
        **_ideal_row(summary),
        "final loss": "no step was run" if loss is None else f"{loss:.6g}",
        **_evaluation_row(summary),
        "preemptions": _preemption_words(summary),
        **_cost_row(summary),
        **({"skipped steps": str(summary["skipped_steps"])} if summary["skipped_steps"] else {}),
        "weights": f"sha256 {summary['weights_sha256'][:12]}",
        "checkpoints": _checkpoint_words(summary["checkpoints"]),
        "files": out or "none: keep them with --out",
    }
    return key_value_table(rows)


def _sample_words(summary: Mapping[str, Any]) -> str:
    lost, duplicated = summary["samples_lost"], summary["samples_duplicated"]
    right = summary["samples"] == summary["samples_expected"] and not lost and not duplicated
    counted = "each counted once" if right else "NOT each counted once"
    counted += f", {summary['samples_redone']} of them run again" if summary.get("samples_redone") else ""
    return (
        f"{summary['samples']}, {counted} (expected {summary['samples_expected']}, "
        f"lost {lost}, duplicated {duplicated})"
    )


def _preemption_words(summary: Mapping[str, Any]) -> str:
    """The number of preemptions, and how each was recovered."""
    if not summary["preemptions"]:
        return "none"
    parts = [
        f"{format_numbered(found['lost'], 'node')} in step {found['step']} by {found['source']}"
        for found in summary["recoveries"]
    ]
    return f"{summary['preemptions']} survived: {', '.join(parts)}"


def _cost_row(summary: Mapping[str, Any]) -> dict[str, str]:
    usd, on_demand = summary.get("cost_usd"), summary.get("cost_on_demand_usd")
    if not usd:
        return {}
    compared = f"; the same steps on demand: ${on_demand:,.4g} ({usd / on_demand - 1:+.0%})" if on_demand else ""
    return {"cost": f"${usd:,.4g}{compared}"}


def _ideal_row(summary: Mapping[str, Any]) -> dict[str, str]:
    """Under a market trace: goodput compared with the best speed of the run."""
    if summary.get("of_ideal") is None:
        return {}
    share = f"{summary['capacity_share']:.0%} of the nodes on average"
    return {
        "ideal": f"reached {summary['of_ideal']:.1%} of its best speed, {summary['ideal_goodput']:.1f}, with {share}"
    }


def _checkpoint_words(steps: Sequence[int]) -> str:
    return f"{len(steps)} written, the newest of step {steps[-1]}" if steps else "none"


def _evaluation_row(summary: Mapping[str, Any]) -> dict[str, str]:
    if not summary["evaluations"]:
        return {}
    step, loss = list(summary["evaluations"].items())[-1]
    return {"evaluation": f"loss {loss:.6g} after step {int(step) + 1}"}


def key_value_table(rows: Mapping[str, str]) -> Table:
    """A table of two columns, name and value."""
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table
