"""How long a loss holds a run up, beside the least that it could: in simulation, at every action of a step.

    python -m benchmarks.pause [--quick | --wide] [--workers N] [--json]

F, I and W take one unit of time each, B two, all else nothing, and a loss is noticed at once: what is left is the work
that the loss makes. The pause is how much later the last step that was open is complete than in the undisturbed run.
Where one step was open, that is the hit step's duration minus the undisturbed one's. It is given in steps.

The bound is the planner's own (culm.plan.least), for what the survivors hold at that moment: how soon the actions that
lineage asks for could be done by any placement at all, less what the undisturbed run would still have taken. Below zero
counts as zero: nobody asks a loss to speed a run up. Units of time are whole here, so the bound is rounded up. It is a
bound on the placement: that no smaller set of actions would do is lineage's promise, and that all steps that were begun
are completed before anything else is how a recovery works.

One thing flatters the simulation: what survivors are computing at the moment of a loss is complete at once. That is
worth up to one action each, for the pause and for the bound alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from culm.cluster.prepare import Request, prepare
from culm.cluster.setup import Setup
from culm.job import Job
from culm.plan.least import outlook
from culm.plan.place import Floor, whole_step
from culm.plan.recover import Recovery
from culm.runtime import epoch as letters
from culm.schedule import Action, Kind, Plan, timing
from culm.testing import Cluster, Faults
from culm.testing.cluster import enact

STAGES, HIT, STEPS = 3, 2, 5
UNITS = {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}
_WIDTH = 2
PROMISE = 0.1 + 1e-9
"""How many steps a pause may be longer than its bound."""


@dataclass(frozen=True, kw_only=True)
class Pause:
    """One loss. Times in undisturbed steps."""

    strategy: str
    schedule: str
    stages: int
    pipelines: int
    micro_batches: int
    """Of each pipeline."""
    node: int
    at: str
    pause: float
    bound: float
    planned: float
    """What the placement that was made comes to by its own account."""

    @property
    def excess(self) -> float:
        return self.pause - self.bound


@dataclass
class Watched:
    """A simulated run: when each step was complete, when nodes were lost, and the epochs that followed."""

    done: dict[int, float]
    killed: float
    epochs: list[letters.Epoch]

    @property
    def step(self) -> float:
        return statistics.median(self.done[step] - self.done[step - 1] for step in range(1, STEPS))


def pauses(setup: Setup, job: Job, moments: Sequence[tuple[int, str]]) -> Iterator[Pause]:
    """Kill a node at each of these moments, one run for each."""
    calm = watch(job, setup, Faults())
    for node, at in moments:
        hurt = watch(job, setup, Faults().kill(node, at=at, step=HIT))
        recovery, plan = hurt.epochs[-1].recovery, Plan.from_text(hurt.epochs[-1].plan)
        last = max(recovery.steps, default=HIT)
        left = calm.done[last] - hurt.killed
        planned = recovery.length if recovery.steps else timing(plan).makespan
        yield Pause(
            strategy=setup.strategy,
            schedule=setup.schedule,
            stages=setup.stages,
            pipelines=setup.pipelines,
            micro_batches=job.micro_batches // setup.pipelines,
            node=node,
            at=at,
            pause=(hurt.done[last] - calm.done[last]) / calm.step,
            bound=max(0.0, (_bound(recovery, plan) - left) / calm.step),
            planned=(planned - left) / calm.step,
        )


def _bound(recovery: Recovery, plan: Plan) -> float:
    """Where nobody who is left had begun a step, the hit one is run by the new plan, as a whole."""
    bound = recovery.bound
    if not recovery.steps:
        runners = {stage: plan.holders_of(stage) for stage in range(plan.stages)}
        floor = Floor(stages=plan.stages, segments=plan.segments, workers=len(plan.workers), runners=runners)
        bound = outlook(whole_step(plan.segments, plan.micro_batches, split=True), floor).bound
    return math.ceil(bound - 1e-9)


def watch(job: Job, setup: Setup, faults: Faults) -> Watched:
    """Run and look on. A step is complete when each stage has made it: copies may follow."""
    stepped: dict[tuple[int, str], float] = {}
    epochs: list[letters.Epoch] = []

    def cost(_: int, step: int, action: str) -> float:
        if action.endswith("S"):
            stepped.setdefault((step, action), asyncio.get_running_loop().time())
        return units(action)

    async def listen(cluster: Cluster) -> None:
        news = cluster.store.subscribe("epoch")
        while True:
            found = letters.decode((await news.get()).value or b"")
            assert isinstance(found, letters.Epoch)
            epochs.append(found)

    run = enact(job, setup, faults=faults, cost=cost, script=listen)
    assert not run.missed(faults), f"{faults} was to strike, and did not"
    done: dict[int, float] = defaultdict(float)
    for (step, _), at in stepped.items():
        done[step] = max(done[step], at)
    killed = next((entry.t for entry in run.history.entries if entry.what == "killed"), 0.0)
    return Watched(dict(done), killed, epochs)


@cache
def units(text: str) -> float:
    """What an action takes: nothing, where it is none of a micro-batch."""
    if not text[:1].isdigit() or text.endswith("+"):
        return 0.0
    return UNITS.get(Action.parse(text).kind, 0.0)


@cache
def described(micro_batches: int, stages: int = STAGES) -> Job:
    """A job that computes next to nothing: time is virtual."""
    data = [(torch.full((_WIDTH,), float(i % 7)), torch.zeros(_WIDTH)) for i in range(micro_batches)]
    return Job(
        layers=[lambda: nn.Linear(_WIDTH, _WIDTH)] * stages,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=data,
        global_batch=micro_batches,
        micro_batch=1,
        steps=STEPS,
    )


def prepared(strategy: str, schedule: str, pipelines: int, each: int, stages: int = STAGES) -> tuple[Setup, Job]:
    """Planned with the costs that actions have here."""
    job = described(pipelines * each, stages)
    setup = prepare(job, Request(pipelines=pipelines, stages=stages, schedule=schedule, strategy=strategy))
    return msgspec.structs.replace(setup, costs=(), eager=strategy == "shadow"), job


def moments(setup: Setup) -> list[tuple[int, str]]:
    """Every action of the workers of the last pipeline, before and after the optimizer step."""
    rows = Plan.from_text(setup.plan).workers
    found = [(node, str(a)) for node in range(len(rows) - setup.stages, len(rows)) for a in rows[node]]
    return found + [(node, f"{at}+") for node, at in found if at.endswith("S")]


class Shape(NamedTuple):
    """A row of the table."""

    strategy: str
    schedule: str
    pipelines: int
    micro_batches: int
    stages: int


def shapes(*, quick: bool = False, wide: bool = False) -> list[Shape]:
    """The rows: pipelines of three stages; wide, also of two and four, and more pipelines and micro-batches."""
    depths: Sequence[int] = (2, 3, 4) if wide else (STAGES,)
    widths: Sequence[int] = (2,) if quick else (1, 2, 3, 4) if wide else (1, 2, 3)
    each: Sequence[int] = (4,) if quick else range(2, 9) if wide else (3, 6)
    kinds = product(("reroute", "shadow", "shadow-lazy"), ("1f1b",) if quick else ("1f1b", "zb"))
    found = (Shape(*kind, *size) for kind, size in product(kinds, product(widths, each, depths)))
    return [shape for shape in found if shape.pipelines > 1 or shape.strategy != "reroute"]


def found_at(shape: Shape) -> list[Pause]:
    """Every loss of a row."""
    torch.set_num_threads(1)
    setup, job = prepared(*shape)
    return list(pauses(setup, job, moments(setup)))


def run(rows: Sequence[Shape], *, workers: int = 1, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The table by strategy, schedule, pipelines, micro-batches and stages; the losses furthest from their bound."""
    made, worst = [], []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for found in pool.imap(found_at, rows):
            made.append(_row(found))
            worst += found
            progress(line(made[-1]))
    worst.sort(key=lambda one: -one.excess)
    within = sum(one.excess <= PROMISE for one in worst) / len(worst)
    shown = [{**asdict(one), "excess": one.excess} for one in worst[:20]]
    return {"rows": made, "losses": len(worst), "within": within, "excess_max": worst[0].excess, "worst": shown}


def _row(found: Sequence[Pause]) -> dict[str, Any]:
    first = found[0]
    return {
        "strategy": first.strategy,
        "schedule": first.schedule,
        "stages": first.stages,
        "pipelines": first.pipelines,
        "micro_batches": first.micro_batches,
        "moments": len(found),
        "pause_median": statistics.median(one.pause for one in found),
        "pause_max": max(one.pause for one in found),
        "bound_median": statistics.median(one.bound for one in found),
        "bound_max": max(one.bound for one in found),
        "excess_max": max(one.excess for one in found),
        "within": sum(one.excess <= PROMISE for one in found) / len(found),
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['strategy']:12}{row['schedule']:6}P={row['stages']} D={row['pipelines']} m={row['micro_batches']}  "
        f"{row['moments']:3} moments  pause {row['pause_median']:6.2f} (max {row['pause_max']:5.2f})  "
        f"bound {row['bound_median']:6.2f} (max {row['bound_max']:5.2f})  worst excess {row['excess_max']:6.3f}  "
        f"within 0.1: {row['within']:4.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pause")
    parser.add_argument("--quick", action="store_true", help="three rows")
    parser.add_argument("--wide", action="store_true", help="two to four stages, up to four pipelines")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = shapes(quick=given.quick, wide=given.wide)
    found = run(rows, workers=given.workers, progress=lambda text: print(text, file=sys.stderr, flush=True))
    if given.json:
        print(json.dumps(found))
        return
    print(f"{found['losses']} losses, {found['within']:.1%} within the bound + 0.1 step; the furthest from it:")
    for one in found["worst"]:
        where = (
            f"{one['strategy']:12}{one['schedule']:6}P={one['stages']} D={one['pipelines']} m={one['micro_batches']}"
        )
        figures = "  ".join(f"{name} {one[name]:6.3f}" for name in ("pause", "bound", "planned"))
        print(f"{where}  node {one['node']} at {one['at']:5} {figures}")


if __name__ == "__main__":
    main()
