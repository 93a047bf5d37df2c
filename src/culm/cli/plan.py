"""`culm plan`: a step in which slots have failed, re-routed to their peers, and what that costs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from culm.cli import values
from culm.cli.display import console_on
from culm.cli.failing import failing
from culm.cli.tables import facts
from culm.errors import UsageError
from culm.plan import Case, Memory, Rerouted, Slot, explain, greedy
from culm.plan.optimal import LIMIT_S, optimal
from culm.schedule import generate, grid, timing


def plan(
    pipelines: Annotated[int, typer.Option(help="D: how many pipelines.")],
    stages: Annotated[int, typer.Option(help="P: stages of a pipeline.")],
    micro_batches: Annotated[int, typer.Option(help="M: micro-batches of a step, over all pipelines.")],
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
    why: Annotated[bool, typer.Option("--explain", help="Say why it takes so long.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Plan a step without the failed slots: live peers run their micro-batches, in their bubbles where they can."""
    with failing(debug=debug):
        solve = _solver(solver, limit)
        case = Case(
            pipelines=pipelines,
            stages=stages,
            micro_batches=micro_batches,
            costs=values.times(times),
            failed=frozenset(map(_slot, fail or [])),
            split=split,
            stagger=stagger,
            memory=_memory(memory),
        )
        found, healthy = solve(case), greedy(replace(case, failed=frozenset()))
        if json_:
            print(json.dumps(_json(found, healthy)))
        else:
            _show(found, healthy, explain(found) if why else ())


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


def _json(found: Rerouted, healthy: Rerouted) -> dict[str, Any]:
    case, lists = found.case, found.plan
    return {
        "slots": _number(found.slots),
        "bound": _number(found.bound),
        "gap": found.gap,
        "peak_activations": max(found.peak_activations),
        "solver": found.solver,
        "slots_no_failure": _number(healthy.slots),
        "slots_1f1b": _number(_one_f_one_b(case)),
        "slowdown": _slowdown(found, healthy),
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


def _show(found: Rerouted, healthy: Rerouted, why: Sequence[str]) -> None:
    timeline = timing(found.plan, found.case.costs)
    alone = f" when steps follow each other, {timeline.makespan:.6g} for one alone" if found.case.stagger else ""
    base = f"{healthy.slots:.6g} planned the same way, {_one_f_one_b(found.case):.6g} with 1F1B"
    rows = {
        "slots": f"{found.slots:.6g} a step{alone}",
        "bound": f"{found.bound:.6g}",
        "gap": f"{found.gap:.1%}",
        "no failure": base,
        "slowdown": f"{_slowdown(found, healthy):.3g}x of the same without a failure",
        "peak activations": str(max(found.peak_activations)),
        "solver": found.solver,
    }
    console_on(stderr=False).print(facts(rows | {f"why {n}": line for n, line in enumerate(why, 1)}))
    print(grid(timeline), end="")


def _one_f_one_b(case: Case) -> float:
    """The step of the schedule that most people know, with every slot filled."""
    shape = {"pipelines": case.pipelines, "stages": case.stages, "micro_batches": case.micro_batches}
    return timing(generate("1f1b", **shape), case.costs).makespan


def _slowdown(found: Rerouted, healthy: Rerouted) -> float:
    return found.slots / healthy.slots if healthy.slots else 1.0


def _number(value: float) -> float:
    """Whole numbers without the .0."""
    return int(value) if value.is_integer() else value
