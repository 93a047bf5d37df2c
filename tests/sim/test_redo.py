"""What a loss adds to its step is what the functions that recover real runs make of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import pause
from culm.plan import Slot
from culm.schedule import UNIT, Plan, generate, timing
from culm.sim.costs import Charges
from culm.sim.redo import LARGE, Redo, late, survivors
from culm.sim.steps import Steps
from culm.sim.workload import Workload


def redo_of(micro_batches: int, pipelines: int = 2, stages: int = 4) -> tuple[Redo, Workload]:
    found = Workload(pipelines=pipelines, stages=stages, micro_batches=micro_batches, costs=UNIT, schedule="1f1b")
    return Redo(Steps(found, Charges())), found


@pytest.mark.parametrize("strategy", ["reroute", "shadow-lazy"])
def test_it_agrees_with_a_simulated_cluster_that_loses_the_node(strategy: str) -> None:
    setup, job = pause.prepared(strategy, "1f1b", 2, 4)
    plan = Plan.from_text(setup.plan)
    step = timing(plan).makespan
    for at in ("1B5", "1F6"):
        (real,) = pause.pauses(setup, job, [(4, at)])
        end = next(span.end for span in timing(plan).spans[4] if str(span.action) == at)
        found = late(plan, UNIT, {4}, (end + 1e-6) / step, strategy) / step
        assert found == pytest.approx(real.planned, abs=2 / step)


@settings(max_examples=25)
@given(st.data())
def test_survivors_have_nothing_that_only_the_lost_had(data: st.DataObject) -> None:
    plan = generate(data.draw(st.sampled_from(("1f1b", "zb"))), pipelines=2, stages=3, micro_batches=8)
    lost, timeline = data.draw(st.integers(0, 5)), timing(plan)
    at = data.draw(st.floats(0, 1)) * timeline.makespan
    found = survivors(timeline, at, {lost}, "reroute")
    assert set(found) == set(range(6)) - {lost}
    for slot, standing in found.items():
        mine = {(action.segment, action.micro) for action in plan.workers[slot]}
        for cells in (standing.forwards, standing.halves, standing.summed):
            assert all((cell.segment, cell.micro) in mine for cell in cells)


def test_nothing_is_late_before_anything_was_done_but_the_work_that_is_left() -> None:
    plan = generate("1f1b", pipelines=2, stages=4, micro_batches=12)
    early, middle = (late(plan, UNIT, {5}, phase, "reroute") for phase in (0.0, 0.5))
    assert 0 < early < 18, "the peer has the bubbles for half of it"
    assert 0 < middle < 18


def test_a_stage_without_a_holder_is_never_made_good() -> None:
    plan = generate("1f1b", pipelines=2, stages=4, micro_batches=12)
    assert math.isinf(late(plan, UNIT, {1, 5}, 0.5, "reroute"))
    assert late(plan, UNIT, {1, 5}, 0.5, "shadow") < math.inf


def test_losses_of_one_stage_add_up_and_those_of_others_do_not() -> None:
    redo, _ = redo_of(12, pipelines=3)
    one = redo.seconds("reroute", 3, [Slot(0, 1)], 0.5)
    assert redo.seconds("reroute", 3, [Slot(0, 1), Slot(1, 1)], 0.5) == 2 * one > 0
    assert redo.seconds("reroute", 3, [Slot(0, 1), Slot(1, 2)], 0.5) < 2 * one


def test_large_cases_are_estimated_near_to_what_is_found_where_one_looks() -> None:
    small, about = redo_of(96)
    assert about.stages * about.micro_batches <= LARGE
    for strategy in ("reroute", "shadow"):
        looked = small.seconds(strategy, 2, [Slot(1, 2)], 0.75)
        assert small._estimate(strategy, 2, 0.75) == pytest.approx(looked, rel=0.6)


def test_many_pipelines_are_like_eight_with_less_to_do() -> None:
    redo, _ = redo_of(128, pipelines=16, stages=2)
    eight, sixteen = (redo.seconds("reroute", many, [Slot(1, 1)], 0.5) for many in (8, 16))
    assert sixteen == pytest.approx(eight * 56 / 240)
