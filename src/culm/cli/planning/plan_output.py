"""Plan output: tables, a text timeline, JSON and files of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from culm.errors import UsageError
from culm.plan import PlanCache, PlanCase, PlanSolution, explain_plan, plan_greedy
from culm.plan.rent.failure_free_step import healthy_plan, planned_step_shape
from culm.plan.replan.failure_options import FailureOption, summarize_options
from culm.plan.replan.planned_schedule import PLANNED, plan_step
from culm.plan.replan.step_bound import step_lower_bound
from culm.plan.replan.symmetry import single_pipeline_case
from culm.schedule import Kind, check_plan, time_plan
from culm.sim.planned_workload import planned_workload, workload_toml
from culm.text_format import format_bytes

if TYPE_CHECKING:
    from culm.plan.rent.rental_options import InstanceOffer, RentalOption, RentalOptions, RentalQuery
    from culm.schedule import Timeline

MAX_FAILURES = 6
"""Largest number of failures in the table of slowdowns."""


def int_if_whole(value: float) -> float:
    """The number as int if it is whole."""
    return int(value) if float(value).is_integer() else value


def makespan_1f1b(case: PlanCase) -> float:
    """The makespan of a 1F1B step with every slot filled, for comparison."""
    return time_plan(healthy_plan(single_pipeline_case(case), "1f1b"), case.costs).makespan


def slowdown(solution: PlanSolution, healthy: PlanSolution) -> float:
    return solution.step_time / healthy.step_time if healthy.step_time else 1.0


def plan_json(solution: PlanSolution, healthy: PlanSolution) -> dict[str, Any]:
    """A plan as JSON; scripts rely on the keys."""
    case, lists = solution.case, solution.plan
    return {
        "slots": int_if_whole(solution.step_time),
        "bound": int_if_whole(solution.lower_bound),
        "gap": solution.gap,
        "peak_activations": max(solution.peak_activations),
        "solver": solution.solver,
        "slots_no_failure": int_if_whole(healthy.step_time),
        "slots_1f1b": int_if_whole(makespan_1f1b(case)),
        "slowdown": slowdown(solution, healthy),
        "pipelines": case.pipelines,
        "stages": case.stages,
        "micro_batches": case.micro_batches,
        "failed": [str(slot) for slot in sorted(case.failed)],
        "split": case.split,
        "stagger": case.stagger,
        "memory": case.memory,
        "why": explain_plan(solution),
        "schedule": {lists.slot_label(worker): list(map(str, row)) for worker, row in enumerate(lists.workers)},
    }


def run_solution(row: RentalOption) -> PlanSolution:
    """The step of a row as a run makes it with every slot filled: under the schedule of the row. Large steps under
    `planned` are those of the greedy planner."""
    case = row.case
    if row.schedule != PLANNED:
        plan = healthy_plan(case, row.schedule)
    elif case.stages * -(-case.micro_batches // case.pipelines) <= _MAX_PLANNED_FORWARDS:
        plan = plan_step(replace(planned_step_shape(case, row.limits), two_ranges=case.two_ranges)).plan
    else:
        plan = plan_greedy(case).plan
    return PlanSolution(
        case=case,
        plan=plan,
        step_time=row.failure_free_step_s,
        lower_bound=min(row.failure_free_step_s, step_lower_bound(case)),
        peak_activations=check_plan(plan).peak_activations,
        solver=row.schedule,
    )


_MAX_PLANNED_FORWARDS = 600
"""Forwards of a pipeline up to which the plan of a run is made for the output."""


def slowdowns(case: PlanCase, plans: PlanCache) -> list[tuple[int, float]]:
    """By number of failures, spread as evenly as possible: by which factor a step takes longer."""
    healthy = plan_greedy(case)
    most = min(MAX_FAILURES, case.stages * (case.pipelines - 1))
    return [(n, slowdown(solution, healthy)) for n, solution in enumerate(plans.plan_failure_counts(case, most), 1)]


def slowdown_table(rows: Sequence[tuple[int, float]]) -> Table:
    table = Table(title="failures, spread as well as can be", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for n, _ in rows:
        table.add_column(str(n), justify="right")
    table.add_row(*(f"{factor:.3f}x" for _, factor in rows))
    return table


def recovery_option_table(ranked: Sequence[FailureOption]) -> Table:
    table = Table(title=summarize_options(ranked), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way")
    for name in ("a step", "more", "spares"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for option in ranked:
        more = option.slots / ranked[0].slots - 1 if ranked[0].slots else 0.0
        about = "" if option.planned else "~"
        table.add_row(option.name, f"{about}{option.slots:.6g}", f"{more:.1%}", str(option.idle), option.how)
    return table


def choice_table(options: RentalOptions, offer: InstanceOffer) -> Table:
    """The rental options, best first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("D x P", "nodes", "micro-batch"):
        table.add_column(name, justify="right")
    table.add_column("strategy")
    for name in ("checkpoint", "zones", "step", "samples/s", "$/h", "$/M samples", "memory"):
        table.add_column(name, justify="right")
    for row in options.table:
        priced = (f"{row.usd_per_h:.2f}", f"{row.usd_per_million:.2f}") if offer.usd_per_h else ("-", "-")
        table.add_row(
            row.shape,
            str(row.nodes),
            str(row.micro_batch),
            row.strategy,
            f"{row.checkpoint_interval_s / 60:.0f} min",
            str(row.zones),
            f"{row.failure_free_step_s:.4g} s",
            f"{row.goodput:.4g}",
            *priced,
            format_bytes(row.memory.total),
        )
    return table


def choices_json(options: RentalOptions, query: RentalQuery, offer: InstanceOffer) -> dict[str, Any]:
    return {
        "instance": offer.instance,
        "budget": None if query.budget_usd_per_h == float("inf") else query.budget_usd_per_h,
        "node_range": list(query.node_range),
        **fleet_json(options.table[0]),
        "batch": query.global_batch,
        "why": options.why,
        "choices": [choice_json(row) for row in options.table],
    }


def fleet_json(row: RentalOption) -> dict[str, Any]:
    """The size and the price of the fleet, under the keys that `culm simulate --json` has, too."""
    return {
        "nodes": row.nodes,
        "workers": row.workers,
        "cost_per_h": row.usd_per_h,
        "schedule_name": row.schedule,
        "step_s": row.failure_free_step_s,
    }


def choice_json(row: RentalOption) -> dict[str, Any]:
    return {
        **fleet_json(row),
        "pipelines": row.case.pipelines,
        "stages": row.case.stages,
        "micro_batch": row.micro_batch,
        "micro_batches": row.case.micro_batches,
        "strategy": row.strategy,
        "checkpoint_every_s": row.checkpoint_interval_s,
        "zones": row.zones,
        "goodput": row.goodput,
        "usd_per_h": row.usd_per_h,
        "usd_per_million": row.usd_per_million,
        "memory_bytes": row.memory.total,
        "memory_parts": row.memory.as_json(),
        "cuts": list(row.cuts),
    }


_KIND_LETTERS = {Kind.F: "F", Kind.I: "I", Kind.W: "W", Kind.B: "B", Kind.R: "r", Kind.S: "s"}


def timeline_strip(timeline: Timeline, width: int, max_workers: int = 16) -> str:
    """The step as text, one line for each worker: the kind of its action at each moment, or a dot if it is idle."""
    plan, spans = timeline.plan, timeline.spans
    shown = min(len(spans), max_workers)
    columns = max(20, width - 8)
    each = timeline.makespan / columns if timeline.makespan else 1.0
    lines = []
    for worker in range(shown):
        marks = ["."] * columns
        for span in spans[worker]:
            first = min(columns - 1, int(span.start / each))
            last = max(first + 1, min(columns, int(span.end / each)))
            marks[first:last] = _KIND_LETTERS[span.action.kind] * (last - first)
        lines.append(f"{plan.slot_label(worker):>6}  {''.join(marks)}")
    if shown < len(spans):
        lines.append(f"        ... and {len(spans) - shown} more workers")
    return "\n".join(lines) + "\n"


def plan_toml(row: RentalOption, name: str, query: RentalQuery, offer: InstanceOffer) -> str:
    """The option as TOML for `culm simulate --plan`."""
    return workload_toml(planned_workload(row, name, query, offer))


def write_text_file(path: str, text: str) -> None:
    """Write a file. Raises UsageError if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
