"""Every way to go on: the shortest first, and by how much it wins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan import Case, Slot, greedy, remedies
from culm.plan.remedies import Remedy, compared
from culm.schedule import Costs

HURT = Case(pipelines=3, stages=4, micro_batches=18, failed=frozenset({Slot(2, 2)}))


def by_name(case: Case) -> dict[str, Remedy]:
    return {remedy.name: remedy for remedy in remedies(case)}


def test_the_means_of_the_paper_stand_beside_each_other() -> None:
    found = by_name(HURT)
    slots = [found[name].slots for name in ("re-route", "re-route, split", "re-route, split, stagger")]
    assert slots == [33, 29, 27]


def test_the_shortest_comes_first_and_nothing_that_the_case_rules_out_is_there() -> None:
    ranked = remedies(replace(HURT, split=False, stagger=False))
    assert [remedy.slots for remedy in ranked] == sorted(remedy.slots for remedy in ranked)
    assert not any("split" in remedy.name or "stagger" in remedy.name for remedy in ranked)


def test_fewer_pipelines_leave_the_healthy_workers_of_the_hurt_one_as_spares() -> None:
    fewer = by_name(HURT)["fewer pipelines"]
    assert fewer.slots == greedy(replace(HURT, pipelines=2, failed=frozenset())).slots == 27
    assert fewer.idle == 3


def test_a_shadow_runs_two_stages_as_one() -> None:
    # With fused backward and equal times the doubled stage works 6 a micro-batch.
    found = by_name(replace(HURT, split=False, stagger=False))["shadow"]
    assert found.slots >= 6 * 6
    assert found.planned


def test_two_neighbours_of_a_pipeline_have_no_shadow() -> None:
    assert "shadow" not in by_name(replace(HURT, failed=frozenset({Slot(2, 1), Slot(2, 2)})))
    assert "shadow" not in by_name(replace(HURT, failed=frozenset({Slot(2, 0), Slot(2, 3)})))


def test_keeping_shadows_current_costs_everybody_a_second_optimizer_step() -> None:
    costly = replace(HURT, costs=Costs(step=5.0), stagger=False)
    assert by_name(costly)["shadow"].slots >= by_name(replace(HURT, stagger=False))["shadow"].slots + 10


def test_holes_are_moved_where_that_helps() -> None:
    both = replace(HURT, failed=frozenset({Slot(1, 2), Slot(2, 2)}))
    assert by_name(both)["re-route after moves"].slots == 27
    assert "1 worker to another stage first" in by_name(both)["re-route after moves"].how
    assert "re-route after moves" not in by_name(HURT)


def test_no_remedy_beats_the_work_of_all_live_workers() -> None:
    for remedy in remedies(HURT):
        assert remedy.slots >= 18 * 4 * 3 / 11 - 1e-9


def test_the_sentence_says_who_wins_and_by_how_much() -> None:
    told = compared(remedies(HURT))
    assert told.startswith("re-route, split, stagger: 27 a step, as short as fewer pipelines")
    assert "uneven pipelines would take 13.6% less" in told
    assert compared((Remedy("a", 10.0, 0, ""), Remedy("b", 11.0, 0, ""))) == "a: 10 a step; b takes 10.0% more"


@given(st.integers(2, 3), st.integers(1, 4), st.integers(3, 9), st.data())
def test_every_case_with_a_failure_has_remedies(D: int, P: int, M: int, data: st.DataObject) -> None:
    slot = Slot(data.draw(st.integers(0, D - 1)), data.draw(st.integers(0, P - 1)))
    case = Case(pipelines=D, stages=P, micro_batches=M, failed=frozenset({slot}), memory="1f1b")
    ranked = remedies(case)
    assert {"re-route", "fewer pipelines", "uneven pipelines"} <= {remedy.name for remedy in ranked}
    assert all(remedy.slots > 0 for remedy in ranked)


@pytest.mark.parametrize("pipelines", [2, 3])
def test_with_a_hole_in_every_pipeline_none_is_whole(pipelines: int) -> None:
    failed = frozenset(Slot(d, d) for d in range(pipelines))
    case = Case(pipelines=pipelines, stages=4, micro_batches=6, failed=failed)
    assert "fewer pipelines" not in by_name(case)
