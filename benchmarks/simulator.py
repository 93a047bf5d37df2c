"""`culm bench simulator`: runs of culm under seeded faults, each predicted by the simulator before it is measured.

Compute is emulated (`benchmarks.napping`). What actions take and what a disturbance costs is measured right before each
case, since machines drift, on runs with faults of their own: no fault of a case has a part in its prediction.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rich import box
from rich.table import Table

from benchmarks import scale
from benchmarks.napping import MICRO_BATCH, MICRO_BATCHES, Case, Seen, measure, profile
from culm.cluster.blows import Kill
from culm.market import Event, Trace
from culm.plan.period import period
from culm.plan.relayout import Model, plan_costs
from culm.plan.reshape import QUIET
from culm.providers.local import LocalNursery
from culm.schedule import Costs, Plan, generate, timing
from culm.sim.costs import Charges
from culm.sim.engine import Run
from culm.sim.strategy import Scene
from culm.sim.study import Price, play
from culm.sim.workload import Workload

SAMPLES = MICRO_BATCH * MICRO_BATCHES
NEVER_S = 1e6
"""Longer than any run."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on runs of its own."""

    costs: Costs
    """Actions as their spans say; `send` is what else a step takes."""
    detect_s: float = 0.0
    decide_s: float = 0.0
    """From the detection until everyone runs again: reports, the new epoch, new connections."""
    again_s: float = 0.0
    """Ending all processes and starting them again, up to the first action."""


def calibrate(case: Case, nursery: LocalNursery, steps: int) -> Calibration:
    """An undisturbed run of the shape and strategy and, where the case has faults, one with a fault of its own."""
    calm = measure(replace(case, steps=steps, kills=(), checkpoint_every=0), nursery)
    if not case.kills:
        return Calibration(costs=costs_of(case, calm, calm.step_s))
    kill = drawn(random.Random(f"calibration {case.name}"), case, range(steps // 2, steps - 2), 1)
    hurt = measure(replace(case, steps=steps, kills=kill, checkpoint_every=2 if case.checkpoint_every else 0), nursery)
    costs = costs_of(case, hurt, calm.step_s)
    if not case.survives:
        phase = moment(case, costs, Kill.parse(kill[0]))
        return Calibration(costs=costs, again_s=max(0.0, hurt.gaps[0] - (1 + phase) * calm.step_s))
    (found,) = hurt.recoveries
    return Calibration(
        costs=costs, detect_s=found["detect_ms"] / 1e3, decide_s=(found["decide_ms"] + found["move_ms"]) / 1e3
    )


def costs_of(case: Case, seen: Seen, step_s: float) -> Costs:
    """F, I and W of each stage as they were seen, and as much for each message as makes the undisturbed step as long
    as it was. A mean, not a median: a worker that never waits feels every late awakening."""
    stages = range(case.stages)
    halves = [_halves(seen, stage) for stage in stages]
    costs = Costs(
        forward=tuple(fmean(seen.spans["F", stage]) for stage in stages),
        input=tuple(half[0] for half in halves),
        weight=tuple(half[1] for half in halves),
    )
    plan = plan_of(case)
    low, high = 0.0, step_s
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if period(plan, replace(costs, send=middle)) > step_s else (middle, high)
    return replace(costs, send=low)


def _halves(seen: Seen, stage: int) -> tuple[float, float]:
    """I and W: half of B each, unless the plan of most steps had them apart."""
    whole, inputs, weights = (seen.spans.get((kind, stage), []) for kind in "BIW")
    if len(whole) >= len(weights):
        return fmean(whole) / 2, fmean(whole) / 2
    return (fmean(inputs) if inputs else 0.0), fmean(weights)


def plan_of(case: Case) -> Plan:
    return generate(case.schedule, pipelines=case.pipelines, stages=case.stages, micro_batches=MICRO_BATCHES)


def moment(case: Case, costs: Costs, kill: Kill) -> float:
    """How much of its step is done when a node has run an action of the undisturbed plan: from 0 to less than 1, since
    after the last action of all there are still sums to be added up."""
    timeline = timing(plan_of(case), costs)
    end = next(span.end for span in timeline.spans[kill.nodes[0]] if str(span.action) == kill.at)
    return min(end / timeline.makespan, 1 - 1e-6)


def predict(case: Case, known: Calibration) -> float:
    """Seconds from the beginning of the first step to the end of the last, from the simulator."""
    scene = Scene.of(_workload(case, known), _charges(case, known), case.reconfigure)
    nodes = case.pipelines * case.stages
    # Who starts a run again has a node for each that was lost: they stand by.
    spares = 0 if case.survives else len(case.kills)
    events = [Event(0.0, "add", f"node{n:02}") for n in range(nodes + spares)]
    began = when(_play(case, scene, events), 0.0)
    for text in case.kills:
        kill = Kill.parse(text)
        assert kill.step is not None
        at = when(_play(case, scene, events), (kill.step + moment(case, known.costs, kill)) * SAMPLES)
        events += [Event(at, "remove", f"node{node:02}") for node in kill.nodes]
    return when(_play(case, scene, events), case.steps * SAMPLES) - began


def when(run: Run, samples: float) -> float:
    """The time at which a run has trained so many samples, for good."""
    last = [point for point in run.points if point.samples <= samples * (1 + 1e-12) and point.rate > 0][-1]
    return last.t + (samples - last.samples) / last.rate


def _play(case: Case, scene: Scene, events: Sequence[Event]) -> Run:
    """Long enough that every run comes to its end."""
    trace = Trace(tuple(events), 100 * case.steps * scene.steps.healthy(case.pipelines))
    return play(scene, case.strategy, trace, Price(1.0, 1.0))


def _workload(case: Case, known: Calibration) -> Workload:
    """Plans are made with what the profile says, and run with what was measured."""
    found = profile(case).layers
    model = Model(layers=found, micro_batches=MICRO_BATCHES, schedule=case.schedule)
    return Workload(
        name=case.name,
        pipelines=case.pipelines,
        stages=case.stages,
        micro_batches=MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        costs=known.costs,
        expected=plan_costs(model, model.cut(case.stages), case.pipelines),
        schedule=case.schedule,
        least_stages=1,
        layers=len(found),
        state_bytes=sum(layer.resident_bytes for layer in found),
        steps=case.steps,
    )


def _charges(case: Case, known: Calibration) -> Charges:
    """What was measured, and nothing that was not. A change of shape is an epoch like that after a loss, and before it
    the open steps drain: the step behind them can not begin while they end."""
    step_s, alone_s = period(plan_of(case), known.costs), timing(plan_of(case), known.costs).makespan
    return Charges(
        detect_s=0.0 if not case.survives else known.detect_s,
        decide_s=0.0 if not case.survives else known.decide_s,
        restart_s=0.0 if case.survives else known.again_s,
        join_s=known.decide_s + alone_s - step_s,
        warm_up_s=0.0,
        stall_s=0.0,
        shadow=0.0,
        checkpoint_every_s=case.checkpoint_every * step_s or NEVER_S,
    )


def drawn(dice: random.Random, case: Case, steps: range, count: int) -> tuple[str, ...]:
    """Kills of nodes in different pipelines and stages, at any of their backwards, in rising steps."""
    shape = (case.pipelines, case.stages)
    pipelines, stages = (dice.sample(range(n), k=count) if n >= count else [dice.randrange(n)] for n in shape)
    each = MICRO_BATCHES // case.pipelines
    found = []
    for pipeline, stage, step in zip(pipelines, stages, sorted(dice.sample(steps, count)), strict=True):
        micro = pipeline * each + dice.randrange(each)
        found.append(f"node={pipeline * case.stages + stage} step={step} at={stage}B{micro}")
    return tuple(found)


_SHAPES = {
    "reroute": ((2, 4), (3, 3), (2, 3)),
    "shadow": ((1, 4), (2, 3)),
    "shadow-lazy": ((2, 4), (2, 3)),
    "checkpoint": ((1, 4), (2, 2)),
    "none": ((2, 2),),
}
"""By strategy: a shape for each seed."""
_FIRST = 300
"""The first seed. Those below were looked at while the simulator was made."""


def cases(*, quick: bool) -> list[Case]:
    """Undisturbed shapes, then each strategy under a few seeded faults; two of them in the second of each."""
    steps = 16 if quick else 24
    found = [
        Case(name=f"{D} x {P}, undisturbed", pipelines=D, stages=P, steps=steps)
        for D, P in ((1, 2), (2, 4))[: 1 if quick else 2]
    ]
    for strategy, shapes in _SHAPES.items():
        for number, (D, P) in enumerate(shapes[:1] if quick else shapes):
            seed = _FIRST + number
            case = Case(name=f"{D} x {P}, {strategy}, seed {seed}", pipelines=D, stages=P, steps=steps)
            every = 4 if strategy == "checkpoint" else 0
            case = replace(case, strategy=strategy, checkpoint_every=every)
            found.append(replace(case, kills=_faults(case, seed, 1 + (number == 1))))
    return found


def _faults(case: Case, seed: int, many: int) -> tuple[str, ...]:
    """Where a run begins anew, one fault: late enough after a checkpoint for it to be complete, or early in the run.
    Else early enough for another shape to pay; two are so near to each other that actions still have the names of the
    first one."""
    dice = random.Random(f"{case.strategy} {seed}")
    late, early = range(case.steps // 3, case.steps - 3), range(case.steps // 6, case.steps // 2)
    if case.strategy == "none":
        return drawn(dice, case, range(2, 6), 1)
    if case.strategy == "checkpoint":
        step = dice.choice([step for step in late if step % case.checkpoint_every >= 2])
        return drawn(dice, case, range(step, step + 1), 1)
    first = dice.choice(early)
    return drawn(dice, case, range(first, first + QUIET), many)


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Calibrate, predict, measure, compare: goodput in samples per second, from the first step on."""
    rows: list[dict[str, Any]] = []
    with LocalNursery() as nursery:
        measure(Case(name="warm up", pipelines=1, stages=4, steps=2), nursery)
        for case in cases(quick=quick):
            known = calibrate(case, nursery, 6 if quick else 8)
            samples = case.steps * SAMPLES
            predicted = samples / predict(case, known)
            measured = samples / measure(case, nursery).seconds
            rows.append({"case": case.name, "predicted": predicted, "measured": measured, "faults": case.kills})
            progress(f"{case.name}: predicted {predicted:.2f}, measured {measured:.2f}")
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    grown = scale.run(quick=quick, progress=progress)
    error = {"error_mean": fmean(errors), "error_max": max(errors)}
    return {"rows": rows, **error, "compute": "emulated", "cores": os.cpu_count(), "scale": grown}


def table(result: dict[str, Any]) -> Table:
    found = Table("case", "predicted", "measured", "error", box=box.SIMPLE, pad_edge=False)
    for row in result["rows"]:
        error = row["predicted"] / row["measured"] - 1
        found.add_row(row["case"], f"{row['predicted']:.2f}", f"{row['measured']:.2f}", f"{error:+.1%}")
    found.caption = (
        f"samples/s, compute emulated; error {result['error_mean']:.1%} on average, {result['error_max']:.1%} at most"
    )
    return found
