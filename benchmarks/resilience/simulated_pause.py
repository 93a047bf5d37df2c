"""How long a loss delays a run, next to the least possible delay: simulated, for a loss at every action of a step.

    python -m benchmarks.resilience.simulated_pause [--quick | --wide] [--workers N] [--json]

F, I and W take one unit of time each, B two, everything else nothing, and a loss is detected at once: only the work
caused by the loss remains. The pause is how much later the last open step is complete than in the failure-free run.
With one open step this is the duration of the hit step minus that of a failure-free one. Pauses are given in steps.

The bound is the planner's own (culm.plan.recover.recovery_bound), for what the survivors hold at that time: how soon
the actions found by lineage could be finished by any placement, minus the remaining time of the failure-free run.
Negative bounds count as zero: a loss is not expected to speed a run up. Units of time are whole numbers, so the bound
is rounded up. It is a bound on the placement: lineage guarantees that no smaller set of actions suffices, and a
recovery always completes all started steps first.

One simplification favours the simulation: actions that survivors are running at the time of a loss are complete at
once. That is worth up to one action each, for the pause and for the bound.
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

from culm.cluster.prepare_run import prepare_run
from culm.cluster.run_setup import RunSetup
from culm.config import RunConfig
from culm.job import Job
from culm.plan.recover.place_work import RunnerPool, whole_step_items
from culm.plan.recover.recovery_bound import recovery_bound
from culm.plan.recover.recovery_plan import RecoveryPlan
from culm.runtime.epoch import Epoch
from culm.runtime.messages import decode
from culm.schedule import Action, Kind, Plan, time_plan
from culm.testing import Cluster, Faults
from culm.testing.simulated_cluster import run_prepared

STAGES, HIT_STEP, STEPS = 3, 2, 5
ACTION_UNITS = {Kind.F: 1.0, Kind.I: 1.0, Kind.W: 1.0, Kind.B: 2.0}
_WIDTH = 2
MAX_EXCESS_STEPS = 0.1 + 1e-9
"""How many steps a pause may exceed its bound."""


@dataclass(frozen=True, kw_only=True)
class SimulatedPause:
    """One loss. Times in failure-free steps."""

    strategy: str
    schedule: str
    stages: int
    pipelines: int
    micro_batches: int
    """Micro-batches per pipeline."""
    node: int
    at: str
    pause: float
    bound: float
    planned: float
    """The pause that the chosen placement predicts."""

    @property
    def excess(self) -> float:
        return self.pause - self.bound


@dataclass
class SimulatedTimeline:
    """A simulated run: when each step was complete, when nodes were lost, and the epochs that followed."""

    step_end: dict[int, float]
    killed_at: float
    epochs: list[Epoch]

    @property
    def step_s(self) -> float:
        return statistics.median(self.step_end[step] - self.step_end[step - 1] for step in range(1, STEPS))


def measure_pauses(setup: RunSetup, job: Job, kill_points: Sequence[tuple[int, str]]) -> Iterator[SimulatedPause]:
    """Kill a node at each of these points, one run for each."""
    failure_free = simulate_run(job, setup, Faults())
    for node, at in kill_points:
        disturbed = simulate_run(job, setup, Faults().kill(node, at=at, step=HIT_STEP))
        recovery, plan = disturbed.epochs[-1].recovery, Plan.from_text(disturbed.epochs[-1].plan)
        last = max(recovery.steps, default=HIT_STEP)
        remaining = failure_free.step_end[last] - disturbed.killed_at
        planned = recovery.makespan if recovery.steps else time_plan(plan).makespan
        yield SimulatedPause(
            strategy=setup.strategy,
            schedule=setup.schedule,
            stages=setup.stages,
            pipelines=setup.pipelines,
            micro_batches=job.micro_batches // setup.pipelines,
            node=node,
            at=at,
            pause=(disturbed.step_end[last] - failure_free.step_end[last]) / failure_free.step_s,
            bound=max(0.0, (_recovery_bound(recovery, plan) - remaining) / failure_free.step_s),
            planned=(planned - remaining) / failure_free.step_s,
        )


def _recovery_bound(recovery: RecoveryPlan, plan: Plan) -> float:
    """The bound. If no survivor had started a step, the whole hit step runs with the new plan."""
    bound = recovery.lower_bound
    if not recovery.steps:
        runners = {stage: plan.holders_of(stage) for stage in range(plan.stages)}
        pool = RunnerPool(stages=plan.stages, segments=plan.segments, worker_count=len(plan.workers), runners=runners)
        bound = recovery_bound(whole_step_items(plan.segments, plan.micro_batches, split=True), pool).makespan
    return math.ceil(bound - 1e-9)


def simulate_run(job: Job, setup: RunSetup, faults: Faults) -> SimulatedTimeline:
    """Run and record. A step is complete when each stage has run S; shadow replicas may follow later."""
    stage_step_times: dict[tuple[int, str], float] = {}
    epochs: list[Epoch] = []

    def cost(_: int, step: int, action: str) -> float:
        if action.endswith("S"):
            stage_step_times.setdefault((step, action), asyncio.get_running_loop().time())
        return action_units(action)

    async def record_epochs(cluster: Cluster) -> None:
        subscription = cluster.store.subscribe("epoch")
        while True:
            epoch = decode((await subscription.get()).value or b"")
            assert isinstance(epoch, Epoch)
            epochs.append(epoch)

    run = run_prepared(job, setup, faults=faults, cost=cost, script=record_epochs)
    assert not run.faults_not_reached(faults), f"{faults} were not reached"
    step_end: dict[int, float] = defaultdict(float)
    for (step, _), finished_at in stage_step_times.items():
        step_end[step] = max(step_end[step], finished_at)
    killed_at = next((entry.t for entry in run.history.entries if entry.what == "killed"), 0.0)
    return SimulatedTimeline(dict(step_end), killed_at, epochs)


@cache
def action_units(text: str) -> float:
    """The duration of an action: 0 if it does not belong to a micro-batch."""
    if not text[:1].isdigit() or text.endswith("+"):
        return 0.0
    return ACTION_UNITS.get(Action.parse(text).kind, 0.0)


@cache
def tiny_job(micro_batches: int, stages: int = STAGES) -> Job:
    """A job that computes almost nothing: time is virtual."""
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


def prepare_setup(
    strategy: str, schedule: str, pipelines: int, micro_batches_per_pipeline: int, stages: int = STAGES
) -> tuple[RunSetup, Job]:
    """A setup that plans with the costs that actions have here."""
    job = tiny_job(pipelines * micro_batches_per_pipeline, stages)
    setup = prepare_run(job, RunConfig(pipelines=pipelines, stages=stages, schedule=schedule, strategy=strategy))
    return msgspec.structs.replace(setup, costs=(), eager_shadows=strategy == "shadow"), job


def kill_points(setup: RunSetup) -> list[tuple[int, str]]:
    """Every action of the workers of the last pipeline, and before and after the optimizer step."""
    rows = Plan.from_text(setup.plan).workers
    points = [(node, str(a)) for node in range(len(rows) - setup.stages, len(rows)) for a in rows[node]]
    return points + [(node, f"{at}+") for node, at in points if at.endswith("S")]


class PauseCase(NamedTuple):
    """A row of the table."""

    strategy: str
    schedule: str
    pipelines: int
    micro_batches: int
    stages: int


def list_cases(*, quick: bool = False, wide: bool = False) -> list[PauseCase]:
    """The rows: pipelines of three stages; with `wide` also of two and four, and more pipelines and micro-batches."""
    depths: Sequence[int] = (2, 3, 4) if wide else (STAGES,)
    pipelines: Sequence[int] = (2,) if quick else (1, 2, 3, 4) if wide else (1, 2, 3)
    micro_batches: Sequence[int] = (4,) if quick else range(2, 9) if wide else (3, 6)
    variants = product(("reroute", "shadow", "shadow-lazy"), ("1f1b",) if quick else ("1f1b", "zb"))
    cases = (
        PauseCase(*variant, *size) for variant, size in product(variants, product(pipelines, micro_batches, depths))
    )
    return [case for case in cases if case.pipelines > 1 or case.strategy != "reroute"]


def measure_case(case: PauseCase) -> list[SimulatedPause]:
    """Every loss of a row."""
    torch.set_num_threads(1)
    setup, job = prepare_setup(*case)
    return list(measure_pauses(setup, job, kill_points(setup)))


def run(
    rows: Sequence[PauseCase], *, workers: int = 1, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The table by strategy, schedule, pipelines, micro-batches and stages; the losses with the largest excess."""
    rows_out, losses = [], []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for pauses in pool.imap(measure_case, rows):
            rows_out.append(_summarize_case(pauses))
            losses += pauses
            progress(format_row(rows_out[-1]))
    losses.sort(key=lambda pause: -pause.excess)
    within_bound = sum(pause.excess <= MAX_EXCESS_STEPS for pause in losses) / len(losses)
    shown = [{**asdict(pause), "excess": pause.excess} for pause in losses[:20]]
    return {
        "rows": rows_out,
        "losses": len(losses),
        "within": within_bound,
        "excess_max": losses[0].excess,
        "worst": shown,
    }


def _summarize_case(pauses: Sequence[SimulatedPause]) -> dict[str, Any]:
    first = pauses[0]
    return {
        "strategy": first.strategy,
        "schedule": first.schedule,
        "stages": first.stages,
        "pipelines": first.pipelines,
        "micro_batches": first.micro_batches,
        "moments": len(pauses),
        "pause_median": statistics.median(pause.pause for pause in pauses),
        "pause_max": max(pause.pause for pause in pauses),
        "bound_median": statistics.median(pause.bound for pause in pauses),
        "bound_max": max(pause.bound for pause in pauses),
        "excess_max": max(pause.excess for pause in pauses),
        "within": sum(pause.excess <= MAX_EXCESS_STEPS for pause in pauses) / len(pauses),
    }


def format_row(row: dict[str, Any]) -> str:
    return (
        f"{row['strategy']:12}{row['schedule']:6}P={row['stages']} D={row['pipelines']} m={row['micro_batches']}  "
        f"{row['moments']:3} moments  pause {row['pause_median']:6.2f} (max {row['pause_max']:5.2f})  "
        f"bound {row['bound_median']:6.2f} (max {row['bound_max']:5.2f})  worst excess {row['excess_max']:6.3f}  "
        f"within 0.1: {row['within']:4.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.resilience.simulated_pause")
    parser.add_argument("--quick", action="store_true", help="three rows")
    parser.add_argument("--wide", action="store_true", help="two to four stages, up to four pipelines")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = list_cases(quick=options.quick, wide=options.wide)
    result = run(rows, workers=options.workers, progress=lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['losses']} losses, {result['within']:.1%} within the bound + 0.1 step; the largest excess:")
    for loss in result["worst"]:
        shape = f"P={loss['stages']} D={loss['pipelines']} m={loss['micro_batches']}"
        where = f"{loss['strategy']:12}{loss['schedule']:6}{shape}"
        figures = "  ".join(f"{name} {loss[name]:6.3f}" for name in ("pause", "bound", "planned"))
        print(f"{where}  node {loss['node']} at {loss['at']:5} {figures}")


if __name__ == "__main__":
    main()
