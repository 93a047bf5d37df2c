"""How long a loss holds a run up, beside the least that it could: in simulation, at every action of a step.

    python -m benchmarks.pause [--quick] [--json]

F, I and W take one unit of time each, B two, all else nothing, and a loss is noticed at once: what is left is the work
that the loss makes. The pause is how much later the last step that was open is complete than in the undisturbed run.
Where one step was open, that is the hit step's duration minus the undisturbed one's. It is given in steps.

The bound is for what the survivors hold at that moment: how soon the actions that lineage asks for could be done by any
placement at all (see `least`), less what the undisturbed run would still have taken. Below zero counts as zero: nobody
asks a loss to speed a run up. It is a bound on the placement: that no smaller set of actions would do is lineage's
promise, and that all steps that were begun are completed before anything else is how a recovery works.

One thing flatters the simulation: what survivors are computing at the moment of a loss is complete at once. That is
worth up to one action each, for the pause and for the bound alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from typing import Any

import msgspec
import torch
from torch import nn

from culm.cluster.prepare import Request, prepare
from culm.cluster.setup import Setup
from culm.job import Job
from culm.plan.edges import Task
from culm.plan.lineage import Cell
from culm.plan.recover import Recovery, needed
from culm.runtime import epoch as letters
from culm.schedule import Action, Kind, Plan, timing
from culm.schedule.action import RELEASE
from culm.testing import Cluster, Faults
from culm.testing.cluster import enact

STAGES, HIT, STEPS = 3, 2, 5
UNITS = {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}
_WIDTH = 2


@dataclass(frozen=True, kw_only=True)
class Pause:
    """One loss. Times in undisturbed steps."""

    strategy: str
    schedule: str
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
        recovery = hurt.epochs[-1].recovery
        if not recovery.steps:
            recovery = _begun_anew(Plan.from_text(hurt.epochs[-1].plan))
        last = max(recovery.steps)
        left = calm.done[last] - hurt.killed
        yield Pause(
            strategy=setup.strategy,
            schedule=setup.schedule,
            pipelines=setup.pipelines,
            micro_batches=job.micro_batches // setup.pipelines,
            node=node,
            at=at,
            pause=(hurt.done[last] - calm.done[last]) / calm.step,
            bound=max(0.0, (least(recovery, STAGES) - left) / calm.step),
            planned=(recovery.length - left) / calm.step,
        )


def _begun_anew(plan: Plan) -> Recovery:
    """Nobody who is left had begun a step: the hit one is run by the new plan, as a whole."""
    stages = range(plan.stages)
    return Recovery(
        steps=(HIT,),
        lists=tuple(tuple((HIT, str(a), False) for a in row if a.micro is not None) for row in plan.workers),
        versions=tuple(dict.fromkeys(plan.stages_of(slot), HIT) for slot in range(len(plan.workers))),
        runners=tuple(plan.holders_of(stage) for stage in stages),
        length=timing(plan).makespan,
    )


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


@dataclass(frozen=True)
class _Work:
    """An action that is left to do: who could do it, and the chains of others before and after it."""

    lot: tuple[Cell, bool]
    """All of a lot is run by one worker."""
    able: frozenset[int]
    units: float
    head: float
    tail: float


def least(recovery: Recovery, stages: int) -> float:
    """No placement of these actions is done earlier.

    For each group of workers, and for what is left to do that nobody else could: it can not begin before the shortest
    chain that leads to it, takes at least its work spread evenly over the group, and the shortest chain that follows on
    it is yet to come. The largest of these over all groups, and over the parts of the work with longer chains. Lots are
    whole, and so are units of time.
    """
    work = _work(recovery, stages)
    chain = max((each.head + each.units + each.tail for each in work), default=0.0)
    able = {each.able for each in work}
    groups = {frozenset().union(*some) for count in (1, 2, 3) for some in combinations(able, count)}
    bounds = [_of_group([each for each in work if each.able <= group], group) for group in groups]
    return math.ceil(max([chain, *bounds]) - 1e-9)


def _of_group(work: Sequence[_Work], group: frozenset[int]) -> float:
    workers = len(group)
    found = min(each.head for each in work) + _packed(work, group) + min(each.tail for each in work)
    for head in {each.head for each in work}:
        late = [each for each in work if each.head >= head]
        for tail in {each.tail for each in late}:
            units = sum(each.units for each in late if each.tail >= tail)
            found = max(found, head + units / workers + tail)
    return found


def _packed(work: Sequence[_Work], group: frozenset[int]) -> float:
    """The busiest of a group when each lot is run by one of them, and all are as small as the smallest: then to give
    each to whoever has least is best."""
    loads = dict.fromkeys(group, 0.0)
    lots: dict[tuple[Cell, bool], float] = defaultdict(float)
    for each in work:
        if len(each.able) == 1:
            loads[min(each.able)] += each.units
        else:
            lots[each.lot] += each.units
    for _ in lots:
        loads[min(loads, key=loads.__getitem__)] += min(lots.values())
    return max(loads.values())


def _work(recovery: Recovery, stages: int) -> list[_Work]:
    tasks = [(slot, task) for slot in range(len(recovery.lists)) for task in recovery.tasks(slot)]
    edges = _edges([task for _, task in tasks], stages)
    heads = _longest(edges)
    tails = _longest(_turned(edges))
    begun = {(slot, _cell(task), task.again) for slot, task in tasks if task.action.kind is Kind.F}
    found = []
    for slot, task in tasks:
        stage = task.action.segment % stages
        holders = [other for other, held in enumerate(recovery.versions) if stage in held]
        free = (slot, _cell(task), task.again) in begun  # what goes on from a tape is bound to the worker that has it
        able = frozenset(holders if task.again else recovery.runners[stage]) if free else frozenset((slot,))
        lot = (_cell(task), task.again)
        found.append(_Work(lot, able, UNITS[task.action.kind], heads[task], tails[task]))
    return found


def _cell(task: Task) -> Cell:
    return Cell(task.step, task.action.segment, task.action.micro or 0)


def _edges(tasks: Sequence[Task], segments: int) -> dict[Task, list[Task]]:
    """What each waits for: its own lot, what another segment makes, and for a new step the sums of the one before."""
    made = {(task.step, name): task for task in tasks for name in _names(task.action)}
    added = defaultdict(list)
    for task in tasks:
        if task.action.kind in RELEASE and not task.again:
            added[task.step, task.action.segment].append(task)
    found: dict[Task, list[Task]] = {}
    for task in tasks:
        step, (segment, kind, micro), _ = task
        own = {Kind.I: Kind.F, Kind.B: Kind.F, Kind.W: Kind.I}.get(kind)
        names = [Action(segment, own, micro)] if own is not None else []
        needs = needed(task.action, segments)
        names += [needs] if needs is not None else []
        found[task] = [made[step, name] for name in names if (step, name) in made and made[step, name] != task]
        found[task] += added[step - 1, segment] if kind is Kind.F and not task.again else []
    return found


def _names(action: Action) -> tuple[Action, ...]:
    """What goes by the name of I, whether I or B made it, is the gradient."""
    return (action, action._replace(kind=Kind.I)) if action.kind is Kind.B else (action,)


def _turned(edges: dict[Task, list[Task]]) -> dict[Task, list[Task]]:
    found: dict[Task, list[Task]] = {task: [] for task in edges}
    for task, before in edges.items():
        for each in before:
            found[each].append(task)
    return found


def _longest(edges: dict[Task, list[Task]]) -> dict[Task, float]:
    """The longest chain that leads to each task."""
    found: dict[Task, float] = {}

    def to(task: Task) -> float:
        if task not in found:
            found[task] = max((to(each) + UNITS[each.action.kind] for each in edges[task]), default=0.0)
        return found[task]

    for task in edges:
        to(task)
    return found


@cache
def described(micro_batches: int) -> Job:
    """A job that computes next to nothing: time is virtual."""
    data = [(torch.full((_WIDTH,), float(i % 7)), torch.zeros(_WIDTH)) for i in range(micro_batches)]
    return Job(
        layers=[lambda: nn.Linear(_WIDTH, _WIDTH)] * STAGES,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=data,
        global_batch=micro_batches,
        micro_batch=1,
        steps=STEPS,
    )


def prepared(strategy: str, schedule: str, pipelines: int, each: int) -> tuple[Setup, Job]:
    """Planned with the costs that actions have here."""
    job = described(pipelines * each)
    setup = prepare(job, Request(pipelines=pipelines, stages=STAGES, schedule=schedule, strategy=strategy))
    return msgspec.structs.replace(setup, costs=(), eager=strategy == "shadow"), job


def moments(setup: Setup) -> list[tuple[int, str]]:
    """Every action of the workers of the last pipeline, before and after the optimizer step."""
    rows = Plan.from_text(setup.plan).workers
    found = [(node, str(a)) for node in range(len(rows) - STAGES, len(rows)) for a in rows[node]]
    return found + [(node, f"{at}+") for node, at in found if at.endswith("S")]


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """The table by strategy, schedule, pipelines and micro-batches; every loss beside its bound."""
    rows, worst = [], []
    for strategy in ("reroute", "shadow", "shadow-lazy"):
        for schedule in ("1f1b",) if quick else ("1f1b", "zb"):
            for pipelines in (2,) if quick else (1, 2, 3):
                for each in (4,) if quick else (3, 6):
                    if strategy == "reroute" and pipelines == 1:
                        continue
                    setup, job = prepared(strategy, schedule, pipelines, each)
                    found = list(pauses(setup, job, moments(setup)))
                    rows.append(_row(found))
                    worst += found
                    progress(line(rows[-1]))
    worst.sort(key=lambda one: -one.excess)
    return {"rows": rows, "worst": [{**asdict(one), "excess": one.excess} for one in worst[:20]]}


def _row(found: Sequence[Pause]) -> dict[str, Any]:
    first = found[0]
    return {
        "strategy": first.strategy,
        "schedule": first.schedule,
        "pipelines": first.pipelines,
        "micro_batches": first.micro_batches,
        "moments": len(found),
        "pause_median": statistics.median(one.pause for one in found),
        "pause_max": max(one.pause for one in found),
        "bound_median": statistics.median(one.bound for one in found),
        "bound_max": max(one.bound for one in found),
        "excess_max": max(one.excess for one in found),
        "within": sum(one.excess <= 0.1 + 1e-9 for one in found) / len(found),
    }


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['strategy']:12}{row['schedule']:6}D={row['pipelines']} m={row['micro_batches']}  "
        f"{row['moments']:3} moments  pause {row['pause_median']:6.2f} (max {row['pause_max']:5.2f})  "
        f"bound {row['bound_median']:6.2f} (max {row['bound_max']:5.2f})  worst excess {row['excess_max']:6.3f}  "
        f"within 0.1: {row['within']:4.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.pause")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = run(quick=given.quick, progress=lambda text: print(text, file=sys.stderr, flush=True))
    if given.json:
        print(json.dumps(found))
        return
    for one in found["worst"]:
        where = f"{one['strategy']:12}{one['schedule']:6}D={one['pipelines']} m={one['micro_batches']}"
        figures = "  ".join(f"{name} {one[name]:6.3f}" for name in ("pause", "bound", "planned"))
        print(f"{where}  node {one['node']} at {one['at']:5} {figures}")


if __name__ == "__main__":
    main()
