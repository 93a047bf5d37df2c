"""`culm bench simulator`: runs of culm under seeded faults, each predicted by the simulator and then measured.

Compute is emulated (`benchmarks.simulator.emulated_runs`). Action times and the costs of a disturbance are measured
right before each case, because machines drift, on separate runs with other faults: the faults of a case never influence
its prediction.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.simulator.emulated_runs import (
    MICRO_BATCH,
    MICRO_BATCHES,
    EmulatedCase,
    EmulatedRun,
    measure_case,
    sleeping_profile,
)
from rich import box
from rich.table import Table

from benchmarks.simulator import simulator_scaling
from culm.cluster.node_faults import KillNode
from culm.market import MarketTrace, NodeEvent
from culm.plan.replan.staggered_period import staggered_period
from culm.plan.reshape.pipeline_shape import ShapeInputs
from culm.plan.reshape.reshape_decision import SETTLE_STEPS
from culm.plan.reshape.run_schedule import ScheduledStep, choose_schedule
from culm.plan.reshape.segment_costs import plan_costs
from culm.providers.local_provider import ForkServerClient
from culm.schedule import Costs, Plan, time_plan
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, simulate_trace
from culm.sim.engine import StrategyRun
from culm.sim.simulated_strategy import SimulationContext
from culm.sim.workload import Workload

SAMPLES = MICRO_BATCH * MICRO_BATCHES
NO_CHECKPOINT_S = 1e6
"""Longer than any run."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measurements from separate calibration runs."""

    costs: Costs
    """Action times from recorded spans; `send` accounts for the rest of a step."""
    detect_s: float = 0.0
    decide_s: float = 0.0
    """From the detection until all workers run again: reports, the new epoch, new connections."""
    restart_s: float = 0.0
    """Ending all processes and starting them again, up to the first action."""


def calibrate(case: EmulatedCase, fork_server: ForkServerClient, steps: int) -> Calibration:
    """Measure a failure-free run of the shape and strategy and, if the case has faults, one with a separate fault."""
    failure_free = measure_case(replace(case, steps=steps, kills=(), checkpoint_every=0), fork_server)
    if not case.kills:
        return Calibration(costs=measured_costs(case, failure_free, failure_free.step_s))
    kill = draw_kills(random.Random(f"calibration {case.name}"), case, range(steps // 2, steps - 2), 1)
    disturbed = measure_case(
        replace(case, steps=steps, kills=kill, checkpoint_every=2 if case.checkpoint_every else 0), fork_server
    )
    costs = measured_costs(case, disturbed, failure_free.step_s)
    if not case.survives_loss:
        phase = kill_phase(case, costs, KillNode.parse(kill[0]))
        return Calibration(
            costs=costs, restart_s=max(0.0, disturbed.restart_gaps[0] - (1 + phase) * failure_free.step_s)
        )
    (recovery,) = disturbed.recoveries
    return Calibration(
        costs=costs, detect_s=recovery["detect_ms"] / 1e3, decide_s=(recovery["decide_ms"] + recovery["move_ms"]) / 1e3
    )


def measured_costs(case: EmulatedCase, run: EmulatedRun, step_s: float) -> Costs:
    """Measured F, I and W of each stage, with the time per message that makes a failure-free step as long as measured.
    Means, not medians: every late wake-up delays a worker that never waits."""
    stages = range(case.stages)
    halves = [_backward_halves(run, stage) for stage in stages]
    costs = Costs(
        forward=tuple(fmean(run.action_seconds["F", stage]) for stage in stages),
        input=tuple(half[0] for half in halves),
        weight=tuple(half[1] for half in halves),
    )
    plan = case_plan(case)
    low, high = 0.0, step_s
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (low, middle) if staggered_period(plan, replace(costs, send=middle)) > step_s else (middle, high)
    return replace(costs, send=low)


def _backward_halves(run: EmulatedRun, stage: int) -> tuple[float, float]:
    """I and W: half of B each, unless the plan of most steps had them split."""
    full, inputs, weights = (run.action_seconds.get((kind, stage), []) for kind in "BIW")
    if len(full) >= len(weights):
        return fmean(full) / 2, fmean(full) / 2
    return (fmean(inputs) if inputs else 0.0), fmean(weights)


def case_plan(case: EmulatedCase) -> Plan:
    """The plan of a failure-free step, as the run makes it."""
    layers = sleeping_profile(case).layers
    model = ShapeInputs(layers=layers, micro_batches=MICRO_BATCHES, schedule=case.schedule)
    step = ScheduledStep(
        layers=layers,
        cuts=model.cut_layers(case.stages),
        pipelines=case.pipelines,
        stages=case.stages,
        micro_batches=MICRO_BATCHES,
    )
    return choose_schedule(case.schedule, step).plan


def kill_phase(case: EmulatedCase, costs: Costs, kill: KillNode) -> float:
    """The finished share of the step when a node has run the action of the kill in the failure-free plan. Below 1,
    because the reduction follows the last action."""
    timeline = time_plan(case_plan(case), costs)
    K = case.workers_per_node
    own = [span for worker in range(kill.nodes[0] * K, (kill.nodes[0] + 1) * K) for span in timeline.spans[worker]]
    assert kill.at is not None
    split = kill.at.replace("B", "W")  # B stands for W where the backward is split
    end = next(span.end for span in own if str(span.action) in (kill.at, split))
    return min(end / timeline.makespan, 1 - 1e-6)


def predict(case: EmulatedCase, calibration: Calibration) -> float:
    """Seconds from the beginning of the first step to the end of the last, from the simulator."""
    context = SimulationContext.create(
        _workload(case, calibration), _cluster_costs(case, calibration), case.reconfigure
    )
    # A restarted run has a replacement for each lost node: these stand by.
    spares = 0 if case.survives_loss else len(case.kills)
    events = [NodeEvent(0.0, "add", f"node{n:02}") for n in range(case.nodes + spares)]
    start = time_of_samples(_simulate_case(case, context, events), 0.0)
    for text in case.kills:
        kill = KillNode.parse(text)
        assert kill.step is not None
        lost_at = time_of_samples(
            _simulate_case(case, context, events), (kill.step + kill_phase(case, calibration.costs, kill)) * SAMPLES
        )
        events += [NodeEvent(lost_at, "remove", f"node{node:02}") for node in kill.nodes]
    return time_of_samples(_simulate_case(case, context, events), case.steps * SAMPLES) - start


def time_of_samples(run: StrategyRun, samples: float) -> float:
    """When a run has trained this many samples for good."""
    last = [point for point in run.points if point.samples <= samples * (1 + 1e-12) and point.rate > 0][-1]
    return last.t + (samples - last.samples) / last.rate


def _simulate_case(case: EmulatedCase, context: SimulationContext, events: Sequence[NodeEvent]) -> StrategyRun:
    """Simulate long enough that every run finishes."""
    trace = MarketTrace(tuple(events), 100 * case.steps * context.step_times.healthy(case.pipelines))
    return simulate_trace(context, case.strategy, trace, NodePrice(1.0, 1.0))


def _workload(case: EmulatedCase, calibration: Calibration) -> Workload:
    """The workload: planned with the profile's times, run with the measured ones."""
    layers = sleeping_profile(case).layers
    model = ShapeInputs(layers=layers, micro_batches=MICRO_BATCHES, schedule=case.schedule)
    return Workload(
        name=case.name,
        pipelines=case.pipelines,
        stages=case.stages,
        micro_batches=MICRO_BATCHES,
        micro_batch=MICRO_BATCH,
        costs=calibration.costs,
        planning_costs=plan_costs(model.layers, model.cut_layers(case.stages), case.pipelines),
        schedule=case.schedule,
        least_stages=1,
        layers=len(layers),
        state_bytes=sum(layer.resident_bytes for layer in layers),
        steps=case.steps,
        workers_per_node=case.workers_per_node,
    )


def _cluster_costs(case: EmulatedCase, calibration: Calibration) -> ClusterCosts:
    """Only measured costs. A change of shape is an epoch change like the one after a loss, and the open steps drain
    before it: the next step cannot begin while they end."""
    step_s, single_step_s = (
        staggered_period(case_plan(case), calibration.costs),
        time_plan(case_plan(case), calibration.costs).makespan,
    )
    return ClusterCosts(
        detect_s=0.0 if not case.survives_loss else calibration.detect_s,
        decide_s=0.0 if not case.survives_loss else calibration.decide_s,
        restart_s=0.0 if case.survives_loss else calibration.restart_s,
        join_s=calibration.decide_s + single_step_s - step_s,
        warm_up_s=0.0,
        stall_s=0.0,
        shadow=0.0,
        checkpoint_every_s=case.checkpoint_every * step_s or NO_CHECKPOINT_S,
    )


def draw_kills(rng: random.Random, case: EmulatedCase, steps: range, count: int) -> tuple[str, ...]:
    """Kills of nodes in different pipelines and stages, at random backwards, in ascending steps."""
    shape = (case.pipelines, case.stages)
    pipelines, stages = (rng.sample(range(n), k=count) if n >= count else [rng.randrange(n)] for n in shape)
    micros_per_pipeline = MICRO_BATCHES // case.pipelines
    kills = []
    for pipeline, stage, step in zip(pipelines, stages, sorted(rng.sample(steps, count)), strict=True):
        micro = pipeline * micros_per_pipeline + rng.randrange(micros_per_pipeline)
        node = (pipeline * case.stages + stage) // case.workers_per_node
        kills.append(f"node={node} step={step} at={stage}B{micro}")
    return tuple(kills)


_SHAPES = {
    "reroute": ((2, 4), (3, 3), (2, 3)),
    "shadow": ((1, 4), (2, 3)),
    "shadow-lazy": ((2, 4), (2, 3)),
    "checkpoint": ((1, 4), (2, 2)),
    "none": ((2, 2),),
}
"""By strategy: a shape for each seed."""
_OTHER_CASES = (
    EmulatedCase(name="", pipelines=2, stages=4, steps=0, strategy="reroute", schedule="zb"),
    EmulatedCase(name="", pipelines=2, stages=4, steps=0, strategy="reroute", workers_per_node=2),
    EmulatedCase(name="", pipelines=3, stages=2, steps=0, strategy="reroute", schedule="planned"),
    EmulatedCase(name="", pipelines=2, stages=2, steps=0, strategy="shadow", workers_per_node=2),
    EmulatedCase(name="", pipelines=4, stages=2, steps=0, strategy="reroute", workers_per_node=2),
    EmulatedCase(name="", pipelines=1, stages=4, steps=0, strategy="shadow-lazy", schedule="zb"),
    EmulatedCase(name="", pipelines=2, stages=3, steps=0, strategy="checkpoint", schedule="zb"),
    EmulatedCase(name="", pipelines=3, stages=3, steps=0, strategy="reroute", schedule="gpipe"),
)
"""Cases with other schedules, and with several workers per node."""
_FIRST_SEED = 300
"""The first seed. Lower seeds were used while the simulator was developed."""


def list_cases(*, quick: bool) -> list[EmulatedCase]:
    """Failure-free shapes, then each strategy under some seeded faults; the second case of each has two faults."""
    steps = 16 if quick else 24
    cases = [
        EmulatedCase(name=f"{D} x {P}, failure-free", pipelines=D, stages=P, steps=steps)
        for D, P in ((1, 2), (2, 4))[: 1 if quick else 2]
    ]
    for strategy, shapes in _SHAPES.items():
        for number, (D, P) in enumerate(shapes[:1] if quick else shapes):
            case = EmulatedCase(name="", pipelines=D, stages=P, steps=steps, strategy=strategy)
            cases.append(_with_faults(case, _FIRST_SEED + number, 1 + (number == 1)))
    for number, more in enumerate(_OTHER_CASES[:1] if quick else _OTHER_CASES):
        cases.append(_with_faults(replace(more, steps=steps), _FIRST_SEED + 100 + number, 1))
    return cases


def _with_faults(case: EmulatedCase, seed: int, count: int) -> EmulatedCase:
    """The case with seeded kills and a name that says what it is."""
    case = replace(case, checkpoint_every=4 if case.strategy == "checkpoint" else 0)
    K = f", {case.workers_per_node} workers per node" if case.workers_per_node > 1 else ""
    schedule = "" if case.schedule == "1f1b" else f" {case.schedule}"
    name = f"{case.pipelines} x {case.stages}{schedule}, {case.strategy}{K}, seed {seed}"
    return replace(case, name=name, kills=_case_kills(case, seed, count))


def _case_kills(case: EmulatedCase, seed: int, count: int) -> tuple[str, ...]:
    """Seeded kills of a case. For strategies that restart, one fault: long enough after a checkpoint for it to be
    complete, or early in the run. For the others, early enough for another shape to pay; two faults are close enough
    together that actions still have the names of the first shape."""
    rng = random.Random(f"{case.strategy} {seed}")
    late, early = range(case.steps // 3, case.steps - 3), range(case.steps // 6, case.steps // 2)
    if case.strategy == "none":
        return draw_kills(rng, case, range(2, 6), 1)
    if case.strategy == "checkpoint":
        step = rng.choice([step for step in late if step % case.checkpoint_every >= 2])
        return draw_kills(rng, case, range(step, step + 1), 1)
    first = rng.choice(early)
    return draw_kills(rng, case, range(first, first + SETTLE_STEPS), count)


def run(*, quick: bool = False, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Calibrate, predict, measure, compare: goodput in samples per second, from the first step on."""
    rows: list[dict[str, Any]] = []
    with ForkServerClient() as fork_server:
        measure_case(EmulatedCase(name="warm up", pipelines=1, stages=4, steps=2), fork_server)
        for case in list_cases(quick=quick):
            calibration = calibrate(case, fork_server, 6 if quick else 8)
            samples = case.steps * SAMPLES
            predicted = samples / predict(case, calibration)
            measured = samples / measure_case(case, fork_server).seconds
            rows.append({"case": case.name, "predicted": predicted, "measured": measured, "faults": case.kills})
            progress(f"{case.name}: predicted {predicted:.2f}, measured {measured:.2f}")
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    scaling = simulator_scaling.run(quick=quick, progress=progress)
    error = {"error_mean": fmean(errors), "error_max": max(errors)}
    return {"rows": rows, **error, "compute": "emulated", "cores": os.cpu_count(), "scale": scaling}


def render_table(result: dict[str, Any]) -> Table:
    table = Table("case", "predicted", "measured", "error", box=box.SIMPLE, pad_edge=False)
    for row in result["rows"]:
        error = row["predicted"] / row["measured"] - 1
        table.add_row(row["case"], f"{row['predicted']:.2f}", f"{row['measured']:.2f}", f"{error:+.1%}")
    table.caption = (
        f"samples/s, compute emulated; error {result['error_mean']:.1%} on average, {result['error_max']:.1%} at most"
    )
    return table
