"""Plans as people and scripts read them: tables, a timeline, JSON, files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from culm.errors import UsageError
from culm.plan import Case, Plans, Rerouted, explain, greedy
from culm.plan.partition import size
from culm.plan.remedies import Remedy, compared
from culm.schedule import Kind, generate, timing

if TYPE_CHECKING:
    from culm.plan.offers import Offer, Offers, Row, Wish
    from culm.schedule import Timeline

SLOWDOWNS = 6
"""Failures up to this number are planned ahead for the explanation."""


def number(value: float) -> float:
    """Whole numbers without the .0."""
    return int(value) if float(value).is_integer() else value


def one_f_one_b(case: Case) -> float:
    """The step of the schedule that most people know, with every slot filled."""
    m = len(case.blocks[0])
    plan = generate("1f1b", pipelines=1, stages=case.stages, micro_batches=m)
    return timing(plan, case.costs).makespan


def slowdown(found: Rerouted, healthy: Rerouted) -> float:
    return found.slots / healthy.slots if healthy.slots else 1.0


def as_json(found: Rerouted, healthy: Rerouted) -> dict[str, Any]:
    """The keys that scripts rely on, and what else there is to say of a plan."""
    case, lists = found.case, found.plan
    return {
        "slots": number(found.slots),
        "bound": number(found.bound),
        "gap": found.gap,
        "peak_activations": max(found.peak_activations),
        "solver": found.solver,
        "slots_no_failure": number(healthy.slots),
        "slots_1f1b": number(one_f_one_b(case)),
        "slowdown": slowdown(found, healthy),
        "pipelines": case.pipelines,
        "stages": case.stages,
        "micro_batches": case.micro_batches,
        "failed": [str(slot) for slot in sorted(case.failed)],
        "split": case.split,
        "stagger": case.stagger,
        "memory": case.memory,
        "why": explain(found),
        "schedule": {lists.label(worker): list(map(str, row)) for worker, row in enumerate(lists.workers)},
    }


def slowdowns(case: Case, plans: Plans) -> list[tuple[int, float]]:
    """By number of failures, each spread as well as can be: how much longer a step takes."""
    healthy = greedy(case)
    most = min(SLOWDOWNS, case.stages * (case.pipelines - 1))
    return [(n, slowdown(found, healthy)) for n, found in enumerate(plans.ahead(case, most), 1)]


def slowdown_table(rows: Sequence[tuple[int, float]]) -> Table:
    made = Table(title="failures, spread as well as can be", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for n, _ in rows:
        made.add_column(str(n), justify="right")
    made.add_row(*(f"{factor:.3f}x" for _, factor in rows))
    return made


def remedy_table(ranked: Sequence[Remedy]) -> Table:
    made = Table(title=compared(ranked), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("way")
    for name in ("a step", "more", "spares"):
        made.add_column(name, justify="right")
    made.add_column("how")
    for remedy in ranked:
        more = remedy.slots / ranked[0].slots - 1 if ranked[0].slots else 0.0
        about = "" if remedy.planned else "~"
        made.add_row(remedy.name, f"{about}{remedy.slots:.6g}", f"{more:.1%}", str(remedy.idle), remedy.how)
    return made


def choice_table(found: Offers, offer: Offer) -> Table:
    """The choices, best first."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("D x P", "nodes", "micro-batch"):
        made.add_column(name, justify="right")
    made.add_column("strategy")
    for name in ("checkpoint", "zones", "step", "samples/s", "$/h", "$/M samples", "memory"):
        made.add_column(name, justify="right")
    for row in found.table:
        priced = (f"{row.usd_h:.2f}", f"{row.usd_per_million:.2f}") if offer.usd_h else ("-", "-")
        made.add_row(
            row.shape,
            str(row.nodes),
            str(row.micro_batch),
            row.strategy,
            f"{row.checkpoint_s / 60:.0f} min",
            str(row.zones),
            f"{row.healthy_s:.4g} s",
            f"{row.goodput:.4g}",
            *priced,
            size(row.memory),
        )
    return made


def choices_json(found: Offers, wish: Wish, offer: Offer) -> dict[str, Any]:
    return {
        "instance": offer.instance,
        "budget": None if wish.budget == float("inf") else wish.budget,
        "nodes": list(wish.nodes),
        "batch": wish.batch,
        "why": found.why,
        "choices": [choice_json(row) for row in found.table],
    }


def choice_json(row: Row) -> dict[str, Any]:
    return {
        "pipelines": row.case.pipelines,
        "stages": row.case.stages,
        "nodes": row.nodes,
        "micro_batch": row.micro_batch,
        "micro_batches": row.case.micro_batches,
        "strategy": row.strategy,
        "checkpoint_every_s": row.checkpoint_s,
        "zones": row.zones,
        "step_s": row.healthy_s,
        "goodput": row.goodput,
        "usd_per_h": row.usd_h,
        "usd_per_million": row.usd_per_million,
        "memory_bytes": row.memory,
        "cuts": list(row.cuts),
    }


_MARKS = {Kind.F: "F", Kind.I: "I", Kind.W: "W", Kind.B: "B", Kind.R: "r", Kind.S: "s"}


def strip(timeline: Timeline, width: int, most: int = 16) -> str:
    """The step from left to right in a line for each worker: what it does at each moment, and a dot when nothing."""
    plan, spans = timeline.plan, timeline.spans
    shown = min(len(spans), most)
    columns = max(20, width - 8)
    each = timeline.makespan / columns if timeline.makespan else 1.0
    lines = []
    for worker in range(shown):
        marks = ["."] * columns
        for span in spans[worker]:
            first = min(columns - 1, int(span.start / each))
            last = max(first + 1, min(columns, int(span.end / each)))
            marks[first:last] = _MARKS[span.action.kind] * (last - first)
        lines.append(f"{plan.label(worker):>6}  {''.join(marks)}")
    if shown < len(spans):
        lines.append(f"        ... and {len(spans) - shown} workers more")
    return "\n".join(lines) + "\n"


def to_toml(row: Row, name: str, wish: Wish, offer: Offer) -> str:
    """The choice as a plan that `culm simulate --plan` reads."""
    case, costs = row.case, row.case.costs
    layers = wish.profiles[row.micro_batch].layers
    state = sum(layer.parameter_bytes + layer.state_bytes for layer in layers) * 3 // 4
    memory = [] if case.memory is None else [f"memory = {_value(case.memory)}"]
    head = {
        "name": name,
        "pipelines": case.pipelines,
        "stages": case.stages,
        "micro_batches": case.micro_batches,
        "micro_batch": row.micro_batch,
        "state_bytes": float(state),
        "layers": len(layers),
        "instance": offer.instance,
    }
    times = {field: getattr(costs, field) for field in ("forward", "input", "weight", "reduce", "step", "send")}
    lines = [f"{key} = {_value(value)}" for key, value in head.items()] + memory
    return "\n".join([*lines, "", "[times]", *(f"{key} = {_value(value)}" for key, value in times.items())]) + "\n"


def _value(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def write(path: str, text: str) -> None:
    """Write a file that was asked for. Raises UsageError where that is not possible."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} can not be written: {error.strerror}; name a file in a folder that exists") from None
