"""`culm plan`: what to rent for a model and what it costs; or a step with failed slots, rerouted to their peers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from culm.cli import option_values
from culm.cli.config_options import Losses, preemption_rate
from culm.cli.error_reporting import report_errors
from culm.cli.planning import plan_output
from culm.cli.planning.fleet_command import parse_count, parse_deadline, print_fleets
from culm.cli.planning.price_warnings import print_price_warnings
from culm.cli.progress_display import make_console
from culm.cli.run_tables import key_value_table
from culm.errors import UsageError
from culm.estimates import plan_inputs
from culm.estimates.fleet_estimate import FleetRequest
from culm.estimates.schedule_choice import default_schedule, parse_schedule
from culm.plan import (
    ActivationLimit,
    PlanCache,
    PlanCase,
    PlanSolution,
    Slot,
    explain_plan,
    list_failure_options,
    plan_greedy,
)
from culm.plan.rent.rental_options import InstanceOffer, RentalOption, RentalOptions, RentalQuery
from culm.plan.rent.strategy_goodput import PreemptionRisk
from culm.plan.replan.cp_sat_planner import DEFAULT_TIME_LIMIT_S, plan_optimal
from culm.schedule import Costs, render_svg, render_text, time_plan
from culm.text_format import count_noun, format_bytes


def plan(
    file: Annotated[str | None, typer.Argument(metavar="[FILE[:function]]", help="A job, profiled here.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A well-known model, as llama-3-8b, or a Hugging Face config.json.")
    ] = None,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="A profile written by culm profile.")] = None,
    instance: Annotated[str | None, typer.Option(help="Instance type of a node, such as p3.2xlarge.")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N|A..B", help="How many nodes.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="X/h", help="At most this many dollars per hour.")] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens to train, as 2B: compares instances by time and cost.")
    ] = None,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="Finish within it, as 3d or 36h.")] = None,
    max_cost: Annotated[
        float | None, typer.Option(metavar="USD", min=0, help="Dollars for the whole run, if instances are compared.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write cost against time as HTML, if instances are compared.")
    ] = None,
    pipelines: Annotated[int | None, typer.Option(help="D: how many pipelines.")] = None,
    stages: Annotated[int | None, typer.Option(help="P: stages of a pipeline.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="M: micro-batches of a step, over all pipelines.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step, for --model and --profile.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples of a micro-batch, for --model.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32 or bf16, for --model; default: bf16 where the accelerator has it.")
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute activations inside layers.")] = False,
    on_demand: Annotated[bool, typer.Option("--on-demand", help="On-demand prices, without preemptions.")] = False,
    rate: Annotated[
        float, typer.Option("--preemption-rate", help="Share of spot nodes expected to be preempted per hour.")
    ] = PreemptionRisk().preemption_rate,
    losses: Losses = None,
    schedule: Annotated[
        str | None, typer.Option(help="planned, 1f1b, zb, gpipe or auto; default: as culm run.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Consider only this strategy: a name or module:Class; repeatable."),
    ] = None,
    prices: Annotated[Path | None, typer.Option(metavar="CSV", help="Your own prices.")] = None,
    on: Annotated[str | None, typer.Option(metavar="DATE", help="Prices of a day, such as 2022-06-30.")] = None,
    times: Annotated[str, typer.Option(help="Durations of F, I, W, R and S.")] = "F=1,I=1,W=1",
    fail: Annotated[
        list[str] | None, typer.Option(metavar="D.S", help="A slot without a worker, counted from 0; repeatable.")
    ] = None,
    split: Annotated[bool, typer.Option("--split/--no-split", help="Split backward into I and W.")] = True,
    stagger: Annotated[
        bool, typer.Option("--stagger/--no-stagger", help="Let each stage start its optimizer step on its own.")
    ] = True,
    memory: Annotated[str, typer.Option(help="Live activations per worker: none, 1f1b (as it keeps), or N.")] = "none",
    solver: Annotated[str, typer.Option(help="greedy, or cp-sat: slower, with proofs of optimality.")] = "greedy",
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of cp-sat.")] = DEFAULT_TIME_LIMIT_S,
    why: Annotated[bool, typer.Option("--explain", help="Explain the plan, and what failures would cost.")] = False,
    picture: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Draw the timeline.")] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the plan: .toml for culm simulate, else as text.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Choose what to rent for a model, or plan a step of a D x P shape with failed slots."""
    with report_errors(debug=debug):
        show = _PlanPrinter(_parse_solver(solver, limit), why, picture, out, json_)
        failed = frozenset(map(_parse_slot, fail or []))
        if file is None and model is None and profile is None:
            case = _case_of_shape(
                pipelines, stages, micro_batches, option_values.parse_action_costs(times), _parse_memory(memory)
            )
            show.print_step(replace(case, failed=failed, split=split, stagger=stagger))
            return
        named_once = model is not None and file is None and profile is None
        if named_once and (instance is None or tokens is not None or deadline is not None or max_cost is not None):
            assert model is not None
            request = FleetRequest(
                model=model,
                instance=instance,
                nodes=None if nodes is None else plan_inputs.parse_node_range(nodes),
                budget_usd_per_h=plan_inputs.parse_budget(budget),
                tokens=None if tokens is None else parse_count(tokens),
                deadline_h=parse_deadline(deadline),
                max_usd=max_cost or math.inf,
                batch=batch,
                micro_batch=micro_batch,
                precision=precision,
                recompute=recompute,
                preemption_rate=preemption_rate(rate, losses),
                on_demand=on_demand,
                strategies=plan_inputs.considered_strategies(strategy),
                schedule=parse_schedule(schedule) or default_schedule(),
                pipelines=pipelines,
                stages=stages,
                prices=prices,
                on=on,
            )
            print_fleets(request, out=out, plot=plot, json_=json_)
            return
        machine = plan_inputs.find_machine(instance, prices, on) if instance else None
        offer = plan_inputs.node_offer(machine, spot=not on_demand)
        low, high = _node_range(nodes, pipelines, stages, offer.workers)
        sizes = plan_inputs.BatchSizes(batch, micro_batch, micro_batches)
        model_source = plan_inputs.ModelSource(file, model, profile)
        inputs = plan_inputs.load_plan_inputs(
            model_source, sizes, machine, precision=precision, recompute=recompute, nodes=high
        )
        query = RentalQuery(
            schedule=parse_schedule(schedule) or default_schedule(),
            profiles=inputs.profiles,
            global_batch=inputs.batch,
            node_range=(low, high),
            budget_usd_per_h=plan_inputs.parse_budget(budget),
            pipelines=pipelines,
            stages=stages,
            strategies=plan_inputs.considered_strategies(strategy),
            risk=PreemptionRisk(preemption_rate=0.0 if on_demand or machine is None else preemption_rate(rate, losses)),
        )
        options, query, notes = plan_inputs.find_options_or_recompute(inputs, query, offer)
        about = [plan_inputs.price_note(machine, spot=not on_demand), *notes]
        warned = () if machine is None else print_price_warnings(machine, on, spot=not on_demand)
        about += [f"warning: {sentence}" for sentence in warned if json_]
        if pipelines and stages:
            row = options.table[0]
            cap = row.case.memory if memory == "none" else _parse_memory(memory)
            case = replace(row.case, failed=failed, split=split, stagger=stagger, memory=cap)
            show.print_shape(case, row, offer, about, plan_output.plan_toml(row, inputs.name, query, offer))
        else:
            show.print_choices(
                options, query, offer, about, plan_output.plan_toml(options.table[0], inputs.name, query, offer)
            )


@dataclass(frozen=True)
class _PlanPrinter:
    """Makes a plan and prints it."""

    solve: Callable[[PlanCase], PlanSolution]
    explain: bool
    picture: str | None
    out: str | None
    json: bool

    def print_step(self, case: PlanCase) -> None:
        """Print a step of a shape, in the unit of its times."""
        solution, healthy = self.solve(case), plan_greedy(replace(case, failed=frozenset()))
        self._write_files(solution)
        if self.json:
            self._print(plan_output.plan_json(solution, healthy) | self._options_json(case))
            return
        console, timeline = make_console(stderr=False), time_plan(solution.plan, case.costs)
        reasons = explain_plan(solution) if self.explain else ()
        rows = _step_rows(solution, healthy, timeline.makespan)
        console.print(key_value_table(rows | {f"why {n}": line for n, line in enumerate(reasons, 1)}))
        if self.explain and case.failed:
            console.print(plan_output.recovery_option_table(list_failure_options(case)))
        small = case.micro_batches * case.stages <= _MAX_GRID_FORWARDS
        print(render_text(timeline) if small else plan_output.timeline_strip(timeline, console.width), end="")

    def print_shape(
        self, case: PlanCase, row: RentalOption, offer: InstanceOffer, about: Sequence[str], toml: str
    ) -> None:
        """Print a shape of a known model on known machines: what to expect, and what failures would cost."""
        solution, healthy = self.solve(case), plan_greedy(replace(case, failed=frozenset()))
        self._write_files(solution, toml)
        more = plan_output.slowdowns(healthy.case, PlanCache())
        if self.json:
            choice = {"choice": plan_output.choice_json(row), **plan_output.fleet_json(row)}
            extra = {**choice, "slowdowns": dict(more), "notes": list(about)}
            self._print(plan_output.plan_json(solution, healthy) | extra | self._options_json(case))
            return
        console = make_console(stderr=False)
        reasons = explain_plan(solution) if self.explain else ()
        rows = _shape_rows(solution, healthy, row, offer) | {f"why {n}": line for n, line in enumerate(reasons, 1)}
        console.print(key_value_table(rows | {f"note {n}": line for n, line in enumerate(about, 1)}))
        console.print(plan_output.slowdown_table(more))
        if self.explain:
            ranked = list_failure_options(
                case if case.failed else replace(case, failed=frozenset({_middle_slot(case)}))
            )
            console.print(plan_output.recovery_option_table(ranked))
            print(plan_output.timeline_strip(time_plan(solution.plan, case.costs), console.width), end="")

    def print_choices(
        self, options: RentalOptions, query: RentalQuery, offer: InstanceOffer, about: Sequence[str], toml: str
    ) -> None:
        """Print the table of rental options."""
        one = plan_output.run_solution(options.table[0]) if self.json or self.picture or self.out else None
        if one is not None:
            self._write_files(one, toml)
        if self.json and one is not None:
            self._print(
                plan_output.plan_json(one, one)
                | plan_output.choices_json(options, query, offer)
                | {"notes": list(about)}
            )
            return
        console = make_console(stderr=False)
        console.print(plan_output.choice_table(options, offer))
        console.print(key_value_table({"why": options.why} | {f"note {n}": line for n, line in enumerate(about, 1)}))

    def _options_json(self, case: PlanCase) -> dict[str, Any]:
        return (
            {"remedies": [asdict(option) for option in list_failure_options(case)]}
            if self.explain and case.failed
            else {}
        )

    def _write_files(self, solution: PlanSolution, toml: str | None = None) -> None:
        if self.picture is not None:
            plan_output.write_text_file(self.picture, render_svg(time_plan(solution.plan, solution.case.costs)))
        if self.out is not None:
            plan_output.write_text_file(
                self.out, toml if toml and self.out.endswith(".toml") else solution.plan.to_text()
            )

    def _print(self, value: dict[str, Any]) -> None:
        print(json.dumps(value))


_MAX_GRID_FORWARDS = 120
"""Up to this number of forwards, a step is drawn action by action."""


def _step_rows(solution: PlanSolution, healthy: PlanSolution, makespan: float) -> dict[str, str]:
    alone = f" when steps follow each other, {makespan:.6g} for one alone" if solution.case.stagger else ""
    baseline = plan_output.makespan_1f1b(solution.case)
    return {
        "slots": f"{solution.step_time:.6g} a step{alone}",
        "bound": f"{solution.lower_bound:.6g}",
        "gap": f"{solution.gap:.1%}",
        "no failure": f"{healthy.step_time:.6g} planned the same way, {baseline:.6g} with 1F1B",
        "slowdown": f"{plan_output.slowdown(solution, healthy):.3g}x of the same without a failure",
        "peak activations": str(max(solution.peak_activations)),
        "solver": solution.solver,
    }


def _shape_rows(
    solution: PlanSolution, healthy: PlanSolution, row: RentalOption, offer: InstanceOffer
) -> dict[str, str]:
    case, samples = solution.case, row.micro_batch * solution.case.micro_batches
    cost = f", {row.usd_per_h:.2f} $/h, {row.usd_per_million:.2f} $ a million samples" if offer.usd_per_h else ""
    slowdown, peak = plan_output.slowdown(solution, healthy), max(solution.peak_activations)
    shape = f"{row.shape} (pipelines x stages), {row.nodes} nodes of {offer.instance}"
    return {
        "shape": shape,
        "batch": f"{samples} samples in {case.micro_batches} micro-batches of {row.micro_batch}",
        "cut": f"stages begin with the layers 0, {', '.join(map(str, row.cuts))}" if row.cuts else "one stage",
        "step": f"{row.failure_free_step_s:.4g} s under {row.schedule} without failures; "
        f"{solution.step_time:.4g} s planned, with {count_noun(len(case.failed), 'failed slot')}",
        "slowdown": f"{slowdown:.4g}x, with {count_noun(len(case.failed), 'slot')} failed",
        "gap to the bound": f"{solution.gap:.1%} (bound {solution.lower_bound:.4g} s)",
        "speed": f"{samples / row.failure_free_step_s:.4g} samples/s without failures",
        "expected": f"{row.goodput:.4g} samples/s with preemptions ({row.strategy}){cost}",
        "checkpoints": f"every {row.checkpoint_interval_s / 60:.0f} min",
        "memory": f"{format_bytes(row.memory.total)} in the fullest stage, up to {peak} live activations: "
        f"{row.memory.describe()}",
        "solver": solution.solver,
    }


def _middle_slot(case: PlanCase) -> Slot:
    """The failed slot to show if the user names none."""
    return Slot(case.pipelines - 1, case.stages // 2)


def _case_of_shape(
    pipelines: int | None, stages: int | None, micro_batches: int | None, costs: Costs, memory: ActivationLimit
) -> PlanCase:
    given = {"--pipelines": pipelines, "--stages": stages, "--micro-batches": micro_batches}
    missing = [option for option, value in given.items() if value is None]
    if missing:
        raise UsageError(
            f"{missing[0]} is missing: give the shape with --pipelines, --stages and --micro-batches, "
            "or a model with --model, --profile or a FILE"
        )
    assert pipelines is not None and stages is not None and micro_batches is not None
    return PlanCase(pipelines=pipelines, stages=stages, micro_batches=micro_batches, costs=costs, memory=memory)


def _node_range(nodes: str | None, pipelines: int | None, stages: int | None, workers: int) -> tuple[int, int]:
    """The numbers of nodes to choose from; without --nodes and with a given shape, those that the shape needs."""
    if nodes is None and pipelines and stages:
        needed = -(-pipelines * stages // workers)
        return 1, max(1, needed)
    return plan_inputs.parse_node_range(nodes)


def _parse_solver(name: str, limit_s: float) -> Callable[[PlanCase], PlanSolution]:
    if name == "cp-sat":
        return partial(plan_optimal, limit_s=limit_s)
    if name != "greedy":
        raise UsageError(f"there is no --solver {name!r}: use greedy or cp-sat")
    return plan_greedy


def _parse_slot(text: str) -> Slot:
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", text.strip())
    if match is None:
        raise UsageError(f"--fail {text!r} is not a slot: write pipeline.stage, both counted from 0, as in --fail 2.1")
    return Slot(int(match[1]), int(match[2]))


def _parse_memory(text: str) -> ActivationLimit:
    if text == "none":
        return None
    if text == "1f1b":
        return "1f1b"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(
            f"--memory {text!r} is not a number of activations: use none, 1f1b, or a number, as in --memory 4"
        )
    return int(text)
