"""The simulator bench predicts with the simulator and measures real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.simulator.emulated_runs import EmulatedCase, measure_case
from benchmarks.simulator.simulator_bench import (
    Calibration,
    case_plan,
    kill_phase,
    list_cases,
    measured_costs,
    predict,
    time_of_samples,
)

from culm.cluster.node_faults import KillNode
from culm.plan.replan.staggered_period import staggered_period
from culm.providers.local_provider import ForkServerClient
from culm.schedule import Costs
from culm.sim.engine import RunPoint, StrategyRun

KNOWN = Calibration(costs=Costs(forward=0.02, input=0.02, weight=0.02), detect_s=0.1, decide_s=0.4, restart_s=2.0)
PLAIN = EmulatedCase(name="plain", pipelines=2, stages=4, steps=20)
STEP_S = (6 + 3) * 0.06


def test_a_failure_free_run_takes_the_time_of_its_steps() -> None:
    assert predict(PLAIN, KNOWN) == pytest.approx(20 * STEP_S, rel=1e-6)


def test_a_restart_costs_its_pause_and_the_steps_since_the_checkpoint() -> None:
    kill = "node=1 step=10 at=1B5"
    disturbed = replace(PLAIN, strategy="checkpoint", kills=(kill,), checkpoint_every=4)
    undone = (2 + kill_phase(disturbed, KNOWN.costs, KillNode.parse(kill))) * STEP_S
    assert predict(disturbed, KNOWN) - predict(PLAIN, KNOWN) == pytest.approx(2.0 + undone, rel=1e-3)


def test_an_unfinished_step_is_in_no_checkpoint() -> None:
    kill = "node=0 step=7 at=0B5"
    disturbed = replace(PLAIN, strategy="checkpoint", kills=(kill,), checkpoint_every=4)
    assert predict(disturbed, KNOWN) - predict(PLAIN, KNOWN) == pytest.approx(2.0 + 4 * STEP_S, rel=1e-3)


def test_without_a_checkpoint_all_work_is_repeated() -> None:
    kill = "node=1 step=3 at=1B5"
    disturbed = replace(PLAIN, strategy="none", kills=(kill,))
    undone = (3 + kill_phase(disturbed, KNOWN.costs, KillNode.parse(kill))) * STEP_S
    assert predict(disturbed, KNOWN) - predict(PLAIN, KNOWN) == pytest.approx(2.0 + undone, rel=1e-3)


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy"])
def test_a_strategy_that_survives_pauses_and_continues_more_slowly(strategy: str) -> None:
    plain = predict(PLAIN, KNOWN)
    keeps = replace(PLAIN, strategy=strategy, reconfigure="never")
    early, late = (predict(replace(keeps, kills=(f"node=5 step={step} at=1B8",)), KNOWN) for step in (5, 15))
    assert plain + 0.5 < late < early
    slower = (early - late) / 10
    assert STEP_S / 5 < slower < STEP_S


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy"])
def test_a_change_of_shape_is_predicted_if_the_loss_is_early_enough(strategy: str) -> None:
    for step, changes in ((5, True), (14, False)):
        disturbed = replace(PLAIN, strategy=strategy, kills=(f"node=5 step={step} at=1B8",))
        assert (predict(disturbed, KNOWN) < predict(replace(disturbed, reconfigure="never"), KNOWN)) == changes


def test_measured_costs_reproduce_the_failure_free_step() -> None:
    seen = type(
        "Seen",
        (),
        {"action_seconds": {("F", s): [0.019, 0.021] for s in range(4)} | {("B", s): [0.04] for s in range(4)}},
    )()
    costs = measured_costs(PLAIN, seen, 0.6)
    assert staggered_period(case_plan(PLAIN), costs) == pytest.approx(0.6)
    assert costs.forward == pytest.approx((0.02,) * 4)


def test_time_of_samples_counts_rolled_back_work_again() -> None:
    points = [(0.0, 1.0, 0.0), (10.0, 0.0, 4.0), (12.0, 2.0, 4.0)]
    run = StrategyRun(points=[RunPoint(t, 1, rate, 0.0, samples) for t, rate, samples in points])
    assert time_of_samples(run, 3.0) == 3.0
    assert time_of_samples(run, 6.0) == 13.0


def test_cases_differ_by_seed_and_leave_time_for_a_checkpoint() -> None:
    result = [case for case in list_cases(quick=False) if case.kills]
    assert len({case.kills for case in result}) == len(result) == 18
    for case in (case for case in result if case.checkpoint_every):
        assert (KillNode.parse(case.kills[0]).step or 0) % case.checkpoint_every >= 2


def test_a_node_with_two_workers_takes_both_of_them_with_it() -> None:
    pair = replace(PLAIN, strategy="reroute", workers_per_node=2, kills=("node=1 step=5 at=3B2",), reconfigure="never")
    assert (PLAIN.nodes, pair.nodes) == (8, 4)
    assert predict(PLAIN, KNOWN) + KNOWN.decide_s < predict(pair, KNOWN)


@pytest.mark.parametrize("case", [case for case in list_cases(quick=False) if case.schedule != "1f1b"], ids=str)
def test_kills_are_found_in_the_plan_of_every_schedule(case: EmulatedCase) -> None:
    for kill in case.kills:
        assert 0 < kill_phase(case, KNOWN.costs, KillNode.parse(kill)) < 1


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.waits(4)
def test_a_killed_run_is_measured_to_its_last_step() -> None:
    brief = EmulatedCase(name="real", pipelines=1, stages=2, steps=6, action_s=0.004)
    once = replace(brief, strategy="checkpoint", kills=("node=1 step=4 at=1B3",), checkpoint_every=2)
    with ForkServerClient() as fork_server:
        again = measure_case(once, fork_server)
        survived = measure_case(
            replace(brief, pipelines=2, strategy="reroute", kills=("node=3 step=3 at=1B8",)), fork_server
        )
    assert again.seconds > again.restart_gaps[0] > 0
    assert [result["lost"] for result in survived.recoveries] == [[3]]
    assert {kind for kind, _ in survived.action_seconds} >= {"F", "S"}
    assert 0 < survived.step_s < survived.seconds
