"""`culm plan`: what to rent and what it will cost; and a step in which slots have failed, re-routed to their peers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from culm.cli import planned, renting, values
from culm.cli.display import console_on
from culm.cli.failing import failing
from culm.cli.tables import facts
from culm.errors import PlanError, UsageError
from culm.plan import Case, Memory, Plans, Rerouted, Slot, explain, greedy, remedies
from culm.plan.goodput import Risk
from culm.plan.offers import Offer, Offers, Row, Wish, offers
from culm.plan.optimal import LIMIT_S, optimal
from culm.plan.partition import count, size
from culm.schedule import Costs, grid, svg, timing


def plan(
    file: Annotated[str | None, typer.Argument(metavar="[FILE[:function]]", help="A job, measured here.")] = None,
    model: Annotated[str | None, typer.Option(help="A well-known model, as bert-large or gpt-3-6.7b.")] = None,
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="What culm profile wrote.")] = None,
    instance: Annotated[str | None, typer.Option(help="What a node is, as p3.2xlarge: memory, network, price.")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N|A..B", help="How many nodes.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="X/h", help="Dollars per hour, at most.")] = None,
    pipelines: Annotated[int | None, typer.Option(help="D: how many pipelines.")] = None,
    stages: Annotated[int | None, typer.Option(help="P: stages of a pipeline.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="M: micro-batches of a step, over all pipelines.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples of a step, for --model and --profile.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Samples of a micro-batch, for --model.")] = None,
    precision: Annotated[str, typer.Option(help="fp32 or bf16, for --model.")] = "fp32",
    recompute: Annotated[bool, typer.Option("--recompute", help="Keep no activations inside layers.")] = False,
    on_demand: Annotated[bool, typer.Option("--on-demand", help="Prices without preemption, and no losses.")] = False,
    losses: Annotated[float, typer.Option(help="Of a spot node, per hour.")] = Risk().losses,
    prices: Annotated[Path | None, typer.Option(metavar="CSV", help="Your own prices.")] = None,
    on: Annotated[str | None, typer.Option(metavar="DATE", help="Prices of a day, as in 2022-06-30.")] = None,
    times: Annotated[str, typer.Option(help="What F, I, W, R and S cost.")] = "F=1,I=1,W=1",
    fail: Annotated[
        list[str] | None, typer.Option(metavar="D.S", help="A slot without a worker, counted from 0; repeatable.")
    ] = None,
    split: Annotated[bool, typer.Option("--split/--no-split", help="Backward in two halves, I and W.")] = True,
    stagger: Annotated[
        bool, typer.Option("--stagger/--no-stagger", help="Let each stage step on its own clock.")
    ] = True,
    memory: Annotated[str, typer.Option(help="Live activations of a worker: none, 1f1b (as it keeps), or N.")] = "none",
    solver: Annotated[str, typer.Option(help="greedy, or cp-sat: slower, and proves what it can.")] = "greedy",
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="How long cp-sat may look.")] = LIMIT_S,
    why: Annotated[bool, typer.Option("--explain", help="Say why, and what failures would cost.")] = False,
    picture: Annotated[str | None, typer.Option("--svg", metavar="FILE", help="Draw the timeline.")] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the plan: .toml for culm simulate, else as text.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Choose what to rent for a model; or plan a step of D x P, with slots that have failed."""
    with failing(debug=debug):
        show = _Shown(_solver(solver, limit), why, picture, out, json_)
        failed = frozenset(map(_slot, fail or []))
        if file is None and model is None and profile is None:
            case = _case(pipelines, stages, micro_batches, values.times(times), _memory(memory))
            show.step(replace(case, failed=failed, split=split, stagger=stagger))
            return
        machine = renting.machine_of(instance, prices, on) if instance else None
        offer = renting.offer_of(machine, spot=not on_demand)
        low, high = _span(nodes, pipelines, stages, offer.workers)
        sizes = renting.Sizes(batch, micro_batch, micro_batches)
        trained = renting.Trained(file, model, profile)
        source = renting.source_of(trained, sizes, machine, precision=precision, recompute=recompute, nodes=high)
        wish = Wish(
            profiles=source.profiles,
            batch=source.batch,
            nodes=(low, high),
            budget=renting.budget_of(budget),
            pipelines=pipelines,
            stages=stages,
            risk=Risk(losses=0.0 if on_demand or machine is None else losses),
        )
        found, notes = _offered(source, wish, offer)
        about = [renting.price_note(machine, spot=not on_demand), *notes]
        if pipelines and stages:
            row = found.table[0]
            cap = row.case.memory if memory == "none" else _memory(memory)
            case = replace(row.case, failed=failed, split=split, stagger=stagger, memory=cap)
            show.shape(case, row, offer, about, planned.to_toml(row, source.name, wish, offer))
        else:
            show.choices(found, wish, offer, about, planned.to_toml(found.table[0], source.name, wish, offer))


def _offered(source: renting.Source, wish: Wish, offer: Offer) -> tuple[Offers, list[str]]:
    """The choices; where nothing fits as it is, those with activations computed again."""
    try:
        return offers(wish, offer), list(source.notes)
    except PlanError:
        if not source.lean:
            raise
    found = offers(replace(wish, profiles=source.lean), offer)
    return found, [*source.notes, "it fits only if activations are computed again (recompute): that is on"]


@dataclass(frozen=True)
class _Shown:
    """How a plan is made, and what is to be seen of it."""

    solve: Callable[[Case], Rerouted]
    why: bool
    picture: str | None
    out: str | None
    json: bool

    def step(self, case: Case) -> None:
        """A step of a shape, in whatever unit its times are."""
        found, healthy = self.solve(case), greedy(replace(case, failed=frozenset()))
        self._files(found)
        if self.json:
            self._print(planned.as_json(found, healthy) | self._remedies(case))
            return
        console, timeline = console_on(stderr=False), timing(found.plan, case.costs)
        reasons = explain(found) if self.why else ()
        told = _rows(found, healthy, timeline.makespan)
        console.print(facts(told | {f"why {n}": line for n, line in enumerate(reasons, 1)}))
        if self.why and case.failed:
            console.print(planned.remedy_table(remedies(case)))
        small = case.micro_batches * case.stages <= _GRID
        print(grid(timeline) if small else planned.strip(timeline, console.width), end="")

    def shape(self, case: Case, row: Row, offer: Offer, about: Sequence[str], toml: str) -> None:
        """A shape of a known model on known machines: what to expect, and what failures would cost."""
        found, healthy = self.solve(case), greedy(replace(case, failed=frozenset()))
        self._files(found, toml)
        more = planned.slowdowns(healthy.case, Plans())
        if self.json:
            extra = {"choice": planned.choice_json(row), "slowdowns": dict(more), "notes": list(about)}
            self._print(planned.as_json(found, healthy) | extra | self._remedies(case))
            return
        console = console_on(stderr=False)
        reasons = explain(found) if self.why else ()
        told = _expected(found, healthy, row, offer) | {f"why {n}": line for n, line in enumerate(reasons, 1)}
        console.print(facts(told | {f"note {n}": line for n, line in enumerate(about, 1)}))
        console.print(planned.slowdown_table(more))
        if self.why:
            ranked = remedies(case if case.failed else replace(case, failed=frozenset({_middle(case)})))
            console.print(planned.remedy_table(ranked))
            print(planned.strip(timing(found.plan, case.costs), console.width), end="")

    def choices(self, found: Offers, wish: Wish, offer: Offer, about: Sequence[str], toml: str) -> None:
        """The table of what could be rented."""
        one = greedy(found.table[0].case) if self.json or self.picture or self.out else None
        if one is not None:
            self._files(one, toml)
        if self.json and one is not None:
            self._print(planned.as_json(one, one) | planned.choices_json(found, wish, offer) | {"notes": list(about)})
            return
        console = console_on(stderr=False)
        console.print(planned.choice_table(found, offer))
        console.print(facts({"why": found.why} | {f"note {n}": line for n, line in enumerate(about, 1)}))

    def _remedies(self, case: Case) -> dict[str, Any]:
        return {"remedies": [asdict(remedy) for remedy in remedies(case)]} if self.why and case.failed else {}

    def _files(self, found: Rerouted, toml: str | None = None) -> None:
        if self.picture is not None:
            planned.write(self.picture, svg(timing(found.plan, found.case.costs)))
        if self.out is not None:
            planned.write(self.out, toml if toml and self.out.endswith(".toml") else found.plan.to_text())

    def _print(self, value: dict[str, Any]) -> None:
        print(json.dumps(value))


_GRID = 120
"""Forwards up to which a step is drawn action by action."""


def _rows(found: Rerouted, healthy: Rerouted, makespan: float) -> dict[str, str]:
    alone = f" when steps follow each other, {makespan:.6g} for one alone" if found.case.stagger else ""
    return {
        "slots": f"{found.slots:.6g} a step{alone}",
        "bound": f"{found.bound:.6g}",
        "gap": f"{found.gap:.1%}",
        "no failure": f"{healthy.slots:.6g} planned the same way, {planned.one_f_one_b(found.case):.6g} with 1F1B",
        "slowdown": f"{planned.slowdown(found, healthy):.3g}x of the same without a failure",
        "peak activations": str(max(found.peak_activations)),
        "solver": found.solver,
    }


def _expected(found: Rerouted, healthy: Rerouted, row: Row, offer: Offer) -> dict[str, str]:
    case, samples = found.case, row.micro_batch * found.case.micro_batches
    cost = f", {row.usd_h:.2f} $/h, {row.usd_per_million:.2f} $ a million samples" if offer.usd_h else ""
    shape = f"{row.shape} (pipelines x stages), {row.nodes} nodes of {offer.instance}"
    return {
        "shape": shape,
        "batch": f"{samples} samples in {case.micro_batches} micro-batches of {row.micro_batch}",
        "cut": f"stages begin with the layers 0, {', '.join(map(str, row.cuts))}" if row.cuts else "one stage",
        "step": f"{found.slots:.4g} s, {planned.one_f_one_b(case):.4g} s with 1F1B",
        "slowdown": f"{planned.slowdown(found, healthy):.4g}x, with {count(len(case.failed), 'slot')} failed",
        "gap to the bound": f"{found.gap:.1%} (bound {found.bound:.4g} s)",
        "speed": f"{samples / found.slots:.4g} samples/s",
        "expected": f"{row.goodput:.4g} samples/s with losses ({row.strategy}){cost}",
        "checkpoints": f"every {row.checkpoint_s / 60:.0f} min",
        "memory": f"{size(row.memory)} in the fullest stage, up to {max(found.peak_activations)} activations alive",
        "solver": found.solver,
    }


def _middle(case: Case) -> Slot:
    """The failure that is shown where nobody named one."""
    return Slot(case.pipelines - 1, case.stages // 2)


def _case(pipelines: int | None, stages: int | None, micro_batches: int | None, costs: Costs, memory: Memory) -> Case:
    given = {"--pipelines": pipelines, "--stages": stages, "--micro-batches": micro_batches}
    missing = [option for option, value in given.items() if value is None]
    if missing:
        raise UsageError(
            f"{missing[0]} is missing: give the shape with --pipelines, --stages and --micro-batches, "
            "or a model with --model, --profile or a FILE"
        )
    assert pipelines is not None and stages is not None and micro_batches is not None
    return Case(pipelines=pipelines, stages=stages, micro_batches=micro_batches, costs=costs, memory=memory)


def _span(nodes: str | None, pipelines: int | None, stages: int | None, workers: int) -> tuple[int, int]:
    """The nodes to choose from; those that a given shape takes, where nobody says."""
    if nodes is None and pipelines and stages:
        needed = -(-pipelines * stages // workers)
        return 1, max(1, needed)
    return renting.nodes_of(nodes)


def _solver(name: str, limit_s: float) -> Callable[[Case], Rerouted]:
    if name == "cp-sat":
        return partial(optimal, limit_s=limit_s)
    if name != "greedy":
        raise UsageError(f"there is no --solver {name!r}: use greedy or cp-sat")
    return greedy


def _slot(text: str) -> Slot:
    match = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", text.strip())
    if match is None:
        raise UsageError(f"--fail {text!r} is no slot: write pipeline.stage, both counted from 0, as in --fail 2.1")
    return Slot(int(match[1]), int(match[2]))


def _memory(text: str) -> Memory:
    if text == "none":
        return None
    if text == "1f1b":
        return "1f1b"
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(
            f"--memory {text!r} is no number of activations: use none, 1f1b, or a number, as in --memory 4"
        )
    return int(text)
