"""Options after a failure: the shortest step first, and by how much it wins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan import PlanCase, Slot, list_failure_options, plan_greedy
from culm.plan.replan.failure_options import FailureOption, summarize_options
from culm.schedule import Costs

CASE_WITH_FAILURE = PlanCase(pipelines=3, stages=4, micro_batches=18, failed=frozenset({Slot(2, 2)}))


def options_by_name(case: PlanCase) -> dict[str, FailureOption]:
    return {remedy.name: remedy for remedy in list_failure_options(case)}


def test_the_variants_of_the_paper_are_listed() -> None:
    result = options_by_name(CASE_WITH_FAILURE)
    slots = [result[name].slots for name in ("re-route", "re-route, split", "re-route, split, stagger")]
    assert slots == [33, 29, 27]


def test_options_are_sorted_and_respect_the_case() -> None:
    ranked = list_failure_options(replace(CASE_WITH_FAILURE, split=False, stagger=False))
    assert [remedy.slots for remedy in ranked] == sorted(remedy.slots for remedy in ranked)
    assert not any("split" in remedy.name or "stagger" in remedy.name for remedy in ranked)


def test_with_fewer_pipelines_healthy_workers_of_the_damaged_one_are_spares() -> None:
    fewer = options_by_name(CASE_WITH_FAILURE)["fewer pipelines"]
    assert fewer.slots == plan_greedy(replace(CASE_WITH_FAILURE, pipelines=2, failed=frozenset())).step_time == 27
    assert fewer.idle == 3


def test_a_shadow_runs_two_stages_as_one() -> None:
    # With fused backward and equal times the doubled stage takes 6 per micro-batch.
    result = options_by_name(replace(CASE_WITH_FAILURE, split=False, stagger=False))["shadow"]
    assert result.slots >= 6 * 6
    assert result.planned


def test_two_adjacent_failures_have_no_shadow() -> None:
    assert "shadow" not in options_by_name(replace(CASE_WITH_FAILURE, failed=frozenset({Slot(2, 1), Slot(2, 2)})))
    assert "shadow" not in options_by_name(replace(CASE_WITH_FAILURE, failed=frozenset({Slot(2, 0), Slot(2, 3)})))


def test_shadows_cost_every_worker_a_second_optimizer_step() -> None:
    costly = replace(CASE_WITH_FAILURE, costs=Costs(step=5.0), stagger=False)
    assert (
        options_by_name(costly)["shadow"].slots
        >= options_by_name(replace(CASE_WITH_FAILURE, stagger=False))["shadow"].slots + 10
    )


def test_holes_are_moved_where_that_helps() -> None:
    both = replace(CASE_WITH_FAILURE, failed=frozenset({Slot(1, 2), Slot(2, 2)}))
    assert options_by_name(both)["re-route after moves"].slots == 27
    assert "1 worker to another stage first" in options_by_name(both)["re-route after moves"].how
    assert "re-route after moves" not in options_by_name(CASE_WITH_FAILURE)


def test_no_option_is_shorter_than_the_work_of_all_live_workers() -> None:
    for remedy in list_failure_options(CASE_WITH_FAILURE):
        assert remedy.slots >= 18 * 4 * 3 / 11 - 1e-9


def test_the_summary_names_the_best_option_and_its_lead() -> None:
    text = summarize_options(list_failure_options(CASE_WITH_FAILURE))
    assert text.startswith("re-route, split, stagger: 27 a step, as short as fewer pipelines")
    assert "uneven pipelines would take 13.6% less" in text
    assert (
        summarize_options((FailureOption("a", 10.0, 0, ""), FailureOption("b", 11.0, 0, "")))
        == "a: 10 a step; b takes 10.0% more"
    )


@given(st.integers(2, 3), st.integers(1, 4), st.integers(3, 9), st.data())
def test_every_case_with_a_failure_has_options(D: int, P: int, M: int, data: st.DataObject) -> None:
    slot = Slot(data.draw(st.integers(0, D - 1)), data.draw(st.integers(0, P - 1)))
    case = PlanCase(pipelines=D, stages=P, micro_batches=M, failed=frozenset({slot}), memory="1f1b")
    ranked = list_failure_options(case)
    assert {"re-route", "fewer pipelines", "uneven pipelines"} <= {remedy.name for remedy in ranked}
    assert all(remedy.slots > 0 for remedy in ranked)


@pytest.mark.parametrize("pipelines", [2, 3])
def test_with_a_failure_in_every_pipeline_fewer_pipelines_is_no_option(pipelines: int) -> None:
    failed = frozenset(Slot(d, d) for d in range(pipelines))
    case = PlanCase(pipelines=pipelines, stages=4, micro_batches=6, failed=failed)
    assert "fewer pipelines" not in options_by_name(case)
