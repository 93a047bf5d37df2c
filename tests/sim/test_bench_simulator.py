"""The bench predicts with the simulator, and what it measures are real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.napping import Case, measure
from benchmarks.simulator import Calibration, cases, costs_of, moment, plan_of, predict, when

from culm.cluster.blows import Kill
from culm.plan.period import period
from culm.providers.local import LocalNursery
from culm.schedule import Costs
from culm.sim.engine import Point, Run

KNOWN = Calibration(costs=Costs(forward=0.02, input=0.02, weight=0.02), detect_s=0.1, decide_s=0.4, again_s=2.0)
PLAIN = Case(name="plain", pipelines=2, stages=4, steps=20)
STEP_S = (6 + 3) * 0.06


def test_an_undisturbed_run_is_its_steps() -> None:
    assert predict(PLAIN, KNOWN) == pytest.approx(20 * STEP_S, rel=1e-6)


def test_a_restart_costs_its_pause_and_the_steps_since_the_checkpoint() -> None:
    kill = "node=1 step=10 at=1B5"
    hurt = replace(PLAIN, strategy="checkpoint", kills=(kill,), checkpoint_every=4)
    undone = (2 + moment(hurt, KNOWN.costs, Kill.parse(kill))) * STEP_S
    assert predict(hurt, KNOWN) - predict(PLAIN, KNOWN) == pytest.approx(2.0 + undone, rel=1e-3)


def test_a_step_that_was_not_added_up_is_in_no_checkpoint() -> None:
    kill = "node=0 step=7 at=0B5"
    hurt = replace(PLAIN, strategy="checkpoint", kills=(kill,), checkpoint_every=4)
    assert predict(hurt, KNOWN) - predict(PLAIN, KNOWN) == pytest.approx(2.0 + 4 * STEP_S, rel=1e-3)


def test_without_a_checkpoint_all_that_was_done_is_done_again() -> None:
    kill = "node=1 step=3 at=1B5"
    hurt = replace(PLAIN, strategy="none", kills=(kill,))
    undone = (3 + moment(hurt, KNOWN.costs, Kill.parse(kill))) * STEP_S
    assert predict(hurt, KNOWN) - predict(PLAIN, KNOWN) == pytest.approx(2.0 + undone, rel=1e-3)


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy"])
def test_a_strategy_that_survives_pauses_and_goes_on_more_slowly(strategy: str) -> None:
    plain = predict(PLAIN, KNOWN)
    keeps = replace(PLAIN, strategy=strategy, reconfigure="never")
    early, late = (predict(replace(keeps, kills=(f"node=5 step={step} at=1B8",)), KNOWN) for step in (5, 15))
    assert plain + 0.5 < late < early
    slower = (early - late) / 10
    assert STEP_S / 5 < slower < STEP_S


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy"])
def test_a_change_of_shape_is_predicted_where_a_loss_comes_early_enough(strategy: str) -> None:
    for step, changes in ((5, True), (14, False)):
        hurt = replace(PLAIN, strategy=strategy, kills=(f"node=5 step={step} at=1B8",))
        assert (predict(hurt, KNOWN) < predict(replace(hurt, reconfigure="never"), KNOWN)) == changes


def test_the_undisturbed_step_is_as_long_as_it_was_seen_to_be() -> None:
    seen = type(
        "Seen", (), {"spans": {("F", s): [0.019, 0.021] for s in range(4)} | {("B", s): [0.04] for s in range(4)}}
    )()
    costs = costs_of(PLAIN, seen, 0.6)
    assert period(plan_of(PLAIN), costs) == pytest.approx(0.6)
    assert costs.forward == pytest.approx((0.02,) * 4)


def test_when_samples_are_reached_counts_what_was_taken_back_once_more() -> None:
    points = [(0.0, 1.0, 0.0), (10.0, 0.0, 4.0), (12.0, 2.0, 4.0)]
    run = Run(points=[Point(t, 1, rate, 0.0, samples) for t, rate, samples in points])
    assert when(run, 3.0) == 3.0
    assert when(run, 6.0) == 13.0


def test_cases_differ_by_seed_and_leave_time_for_a_checkpoint() -> None:
    found = [case for case in cases(quick=False) if case.kills]
    assert len({case.kills for case in found}) == len(found) == 10
    for case in (case for case in found if case.checkpoint_every):
        assert (Kill.parse(case.kills[0]).step or 0) % case.checkpoint_every >= 2


@pytest.mark.usefixtures("forked")
@pytest.mark.real
@pytest.mark.waits(4)
def test_a_killed_run_is_measured_to_its_last_step() -> None:
    brief = Case(name="real", pipelines=1, stages=2, steps=6, action_s=0.004)
    once = replace(brief, strategy="checkpoint", kills=("node=1 step=4 at=1B3",), checkpoint_every=2)
    with LocalNursery() as nursery:
        again = measure(once, nursery)
        survived = measure(replace(brief, pipelines=2, strategy="reroute", kills=("node=3 step=3 at=1B8",)), nursery)
    assert again.seconds > again.gaps[0] > 0
    assert [found["lost"] for found in survived.recoveries] == [[3]]
    assert {kind for kind, _ in survived.spans} >= {"F", "S"}
    assert 0 < survived.step_s < survived.seconds
