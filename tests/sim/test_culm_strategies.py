"""Simulated strategies change their shape where the leader of a real run would."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cached_runs import cached_setup

from culm import Job
from culm.errors import PlanError
from culm.market import MarketTrace, NodeEvent
from culm.plan import LayerCost, Profile, Slot
from culm.plan.reshape.reconfigure_policy import PipelineLayout, ReconfigureDecision
from culm.plan.reshape.reshape_decision import RESHAPE_DELAY_STEPS, SETTLE_STEPS, decide_reshape
from culm.schedule import Costs
from culm.sim import baseline_strategies, culm_strategies
from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, simulate_trace
from culm.sim.shape_step_times import ShapeStepTimes, max_uncovered_pipelines
from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext
from culm.sim.step_times import StepTimes
from culm.sim.workload import Workload
from culm.strategies import get
from culm.testing import Faults
from culm.testing.chaos import make_job
from culm.testing.simulated_cluster import run_prepared

WORK = Workload(
    name="small",
    pipelines=3,
    stages=4,
    micro_batches=18,
    costs=Costs(forward=0.1, input=0.1, weight=0.1),
    state_bytes=4e9,
    least_stages=2,
    layers=12,
    planned_activations=(18,) * 4,
)
CHARGES = ClusterCosts(warm_up_s=0.0, restart_s=0.0)
PRICE = NodePrice(1.0, 3.0)
HOUR = 3600.0


def trace(*changes: tuple[float, str, int], nodes: int = 12, hours: float = 2.0) -> MarketTrace:
    """This many nodes from the start; then (second, add or remove, number of the node)."""
    there = [NodeEvent(0.0, "add", f"n{n:02}") for n in range(nodes)]
    later = [NodeEvent(t, "add" if kind == "add" else "remove", f"n{n:02}") for t, kind, n in changes]
    return MarketTrace((*there, *later), hours * HOUR)


def rates(name: str, lived: MarketTrace, reconfigure: str = "cost") -> list[float]:
    """Samples per second, from the start to the end, whenever they changed; pauses left out."""
    run = simulate_trace(SimulationContext.create(WORK, CHARGES, reconfigure), name, lived, PRICE)
    found = [point.rate for point in run.points if point.rate > 0]
    return [rate for i, rate in enumerate(found) if i == 0 or not math.isclose(rate, found[i - 1])]


STEPS = StepTimes(WORK, CHARGES)
WHOLE = WORK.samples / STEPS.healthy(3)
HURT = WORK.samples / STEPS.rerouted(3, (0, 1, 0, 0))
CUT = WORK.samples / STEPS._mixed_depths_cached((4, 4, 3))
LOST = (HOUR, "remove", 5)


def test_peers_take_over_and_after_some_quiet_steps_all_nodes_are_in_other_pipelines() -> None:
    assert rates("reroute", trace(LOST)) == pytest.approx([WHOLE, HURT, CUT])


def test_the_shape_changes_between_the_steps_at_which_a_leader_would_change_it() -> None:
    run = simulate_trace(SimulationContext.create(WORK, CHARGES), "reroute", trace(LOST), PRICE)
    hurt = next(point for point in run.points if math.isclose(point.rate, HURT))
    left = next(point for point in run.points if point.t > hurt.t)
    assert hurt.samples / WORK.samples == pytest.approx(round(hurt.samples / WORK.samples))
    assert (left.samples - hurt.samples) / WORK.samples == pytest.approx(SETTLE_STEPS + RESHAPE_DELAY_STEPS - 1)


def test_a_change_takes_as_long_as_the_state_of_a_stage_and_a_new_epoch_do() -> None:
    run = simulate_trace(SimulationContext.create(WORK, CHARGES), "reroute", trace(LOST), PRICE)
    assert run.seconds_by_kind["move"] == pytest.approx(CHARGES.move_s(WORK))
    assert run.seconds_by_kind["join"] == pytest.approx(CHARGES.join_s)
    assert run.decision_counts == {"start": 1, "stay": 1, "uneven": 1}


def test_nothing_changes_while_nodes_come_and_go() -> None:
    often = [(HOUR + 2 * n * STEPS.healthy(3), "remove" if n % 2 else "add", 20) for n in range(1, 30)]
    run = simulate_trace(
        SimulationContext.create(WORK, CHARGES), "reroute", trace(LOST, *often[1:-1], hours=1.03), PRICE
    )
    assert "uneven" not in run.decision_counts


def test_when_nodes_come_back_pipelines_are_whole_again() -> None:
    assert rates("reroute", trace(LOST, (1.5 * HOUR, "add", 20)))[-1] == pytest.approx(WHOLE)


def test_a_hole_is_filled_at_once_and_nothing_else_changes() -> None:
    run = simulate_trace(SimulationContext.create(WORK, CHARGES), "reroute", trace(LOST, nodes=13), PRICE)
    assert run.decision_counts["fill"] == 1
    assert run.points[-1].rate == pytest.approx(WHOLE)


def test_never_keeps_the_shape_and_bamboos_rule_makes_fewer_pipelines() -> None:
    two = trace(LOST, (HOUR, "remove", 10))
    assert rates("reroute", two, "never")[-1] == pytest.approx(WORK.samples / STEPS.rerouted(3, (0, 1, 1, 0)))
    assert rates("reroute", two, "bamboo")[-1] == pytest.approx(WORK.samples / STEPS.healthy(2))


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(PlanError, match="there is no policy 'costs': did you mean 'cost'"):
        SimulationContext.create(WORK, CHARGES, "costs")


def test_short_before_the_end_of_a_run_nothing_changes() -> None:
    lost = trace((20 * STEPS.healthy(3), "remove", 5))
    for steps, changes in ((400, True), (40, False)):
        run = simulate_trace(SimulationContext.create(replace(WORK, steps=steps), CHARGES), "reroute", lost, PRICE)
        assert ("uneven" in run.decision_counts) == changes


@pytest.mark.parametrize("name", ["shadow", "shadow-lazy"])
def test_a_shadow_takes_over_until_the_pipelines_are_formed_anew(name: str) -> None:
    first, hurt, last = rates(name, trace(LOST))
    assert hurt < last < first
    assert first == pytest.approx(WHOLE / (1 + CHARGES.shadow))


def test_neighbours_that_go_together_leave_their_peers_to_run_their_work() -> None:
    run = simulate_trace(SimulationContext.create(WORK, CHARGES), "shadow", trace(LOST, (HOUR, "remove", 6)), PRICE)
    assert run.rollbacks == 0


def test_a_stage_whose_last_holder_goes_later_was_copied_before() -> None:
    work = replace(WORK, pipelines=2)
    for later, rollbacks in ((60.0, 0), (0.5, 1)):
        both = trace((HOUR, "remove", 1), (HOUR + later, "remove", 5), nodes=8)
        run = simulate_trace(SimulationContext.create(work, CHARGES, "never"), "reroute", both, PRICE)
        assert run.rollbacks == rollbacks
        assert 0 < run.points[-1].rate < WORK.samples / STEPS.rerouted(2, (0, 1, 0, 0))


def test_after_a_rollback_the_shape_is_the_same_until_it_is_judged() -> None:
    both = trace((HOUR, "remove", 1), (HOUR, "remove", 5), nodes=8)
    run = simulate_trace(SimulationContext.create(replace(WORK, pipelines=2), CHARGES), "reroute", both, PRICE)
    assert run.rollbacks == 1
    assert any(
        math.isclose(point.rate, WORK.samples / STEPS.layout_step_s(PipelineLayout((4, 4), 2))) for point in run.points
    )
    assert run.decision_counts["depth"] == 1


def test_auto_is_the_strategy_that_a_run_would_choose() -> None:
    def chosen(work: Workload, costs: ClusterCosts) -> SimulatedStrategy:
        return get("auto").simulated(SimulationContext.create(work, costs))

    alone = replace(WORK, pipelines=1)
    for name, found in (
        ("reroute", chosen(WORK, ClusterCosts())),
        ("shadow", chosen(alone, ClusterCosts(shadow=0.01))),
    ):
        assert isinstance(found, culm_strategies.ReconfiguringStrategy)
        assert found.strategy is get(name)
    assert isinstance(chosen(alone, ClusterCosts(shadow=9.0)), baseline_strategies.SimulatedCheckpoint)


holes_of = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6)


@given(holes_of, st.booleans())
def test_a_part_is_lost_when_no_pipeline_has_its_worker_or_its_shadow(
    gone: set[tuple[int, int]], shadows: bool
) -> None:
    depths, holes = (3, 3, 2), [Slot(d, s) for d, s in gone if (d, s) != (2, 2)]

    def bare(d: int, layer: int) -> bool:
        s = layer * depths[d] // 6
        return Slot(d, s) in holes and (not shadows or Slot(d, (s - 1) % depths[d]) in holes)

    assert max_uncovered_pipelines(depths, holes, shadows=shadows) == max(
        sum(bare(d, layer) for d in range(3)) for layer in range(6)
    )


def test_small_cases_are_cut_and_planned_and_large_ones_are_near_to_that() -> None:
    given_ = replace(WORK, schedule="1f1b", stagger=False, split=False)
    planned, told = (
        ShapeStepTimes(StepTimes(given_, CHARGES)),
        ShapeStepTimes(StepTimes(replace(given_, micro_batches=180), CHARGES)),
    )
    assert planned.plans_shapes
    assert not told.plans_shapes
    for depths in ((4, 4, 3), (3, 3), (6, 6)):
        assert told.predicted_step_s(depths) / 10 == pytest.approx(planned.predicted_step_s(depths), rel=0.35)
    hole = frozenset([Slot(2, 1)])
    assert planned.actual_step_s((4, 4, 3), hole, get("reroute")) > planned.actual_step_s(
        (4, 4, 3), frozenset(), get("reroute")
    )


# The same loss in a cluster with a real leader.

SECONDS = 0.02
LAYERS, MICRO_BATCHES = 6, 6
JOB = replace(make_job((), True, MICRO_BATCHES), steps=20)


def alike(job: Job) -> Profile:
    """Of the job's layers; all take the same time and have next to nothing to move."""
    cost = {"forward_s": SECONDS, "input_s": SECONDS, "weight_s": SECONDS, "state_bytes": 8}
    seen = [(layer.name, layer.parameter_bytes) for layer in cached_setup(job).layers]
    layers = [
        LayerCost(name=name, parameter_bytes=size, **cost, activation_bytes=4, output_bytes=4)  # type: ignore[arg-type]
        for name, size in seen
    ]
    return Profile(layers=tuple(layers), device="virtual", micro_batch=1, threads=1, source="measured")


def decided_by_a_leader(folder: Path, job: Job, lost: int, **request: Any) -> list[tuple[str, str]]:
    """What the leader of a simulated cluster decided, whose every action takes what the profile says."""
    alike(job).save(folder / "profile.json")
    run = folder / "run"
    each: float = SECONDS * LAYERS / request["stages"]

    def cost(_node: int, _step: int, action: str) -> float:
        return each * (2 if "B" in action else 1 if action[-1].isdigit() else 0)

    faults = Faults().kill(lost, step=3, nth=2)
    run_prepared(
        job, cached_setup(job, profile=str(folder / "profile.json"), out=str(run), **request), faults=faults, cost=cost
    )
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(event["verdict"], event["layout"]) for event in events if event["kind"] == "decision"]


def decided_here(lost: int, steps: int, monkeypatch: pytest.MonkeyPatch, **request: Any) -> list[tuple[str, str]]:
    """What the simulator decides about the same."""
    found: list[tuple[str, str]] = []

    def heard(*given_: Any) -> tuple[ReconfigureDecision, str]:
        decision, why = decide_reshape(*given_)
        found.append((decision.kind, str(decision.layout)))
        return decision, why

    monkeypatch.setattr(culm_strategies, "decide_reshape", heard)
    D, P = request["pipelines"], request["stages"]
    each = SECONDS * LAYERS / P
    shape: Mapping[str, Any] = {"pipelines": D, "stages": P, "micro_batches": MICRO_BATCHES, "schedule": "1f1b"}
    costs = Costs(forward=each, input=each, weight=each, send=4e-9)
    work = Workload(**shape, costs=costs, layers=LAYERS, least_stages=1, steps=steps, state_bytes=LAYERS * 12)
    scene = SimulationContext.create(
        work, replace(CHARGES, detect_s=0.0, decide_s=0.0, join_s=0.0), request.get("reconfigure", "cost")
    )
    at = 3.3 * scene.step_times.healthy(D)
    simulate_trace(scene, request["strategy"], trace((at, "remove", lost), nodes=D * P), PRICE)
    return found


@pytest.mark.parametrize(
    ("strategy", "pipelines", "stages", "lost", "policy"),
    [
        ("reroute", 2, 3, 1, "cost"),
        ("reroute", 3, 2, 2, "cost"),
        ("shadow", 2, 3, 4, "cost"),
        ("shadow-lazy", 1, 3, 1, "cost"),
        ("reroute", 3, 2, 2, "bamboo"),
        ("reroute", 2, 3, 1, "never"),
    ],
)
def test_a_leader_decides_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, pipelines: int, stages: int, lost: int, policy: str
) -> None:
    asked = {"strategy": strategy, "pipelines": pipelines, "stages": stages, "reconfigure": policy}
    by_leader = decided_by_a_leader(tmp_path, JOB, lost, **asked)
    assert bool(by_leader) == (policy != "never")
    assert decided_here(lost, JOB.steps, monkeypatch, **asked) == by_leader
