"""Large cases: pipelines that are alike are planned once, and a failure concerns a few of them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan import Case, Slot, bound, greedy
from culm.plan.alike import concerned, part, solo
from culm.plan.greedy import duration
from culm.schedule import Costs, check

GREEDY = import_module("culm.plan.greedy")
"""The module; the package shows the function of that name."""

WIDE = Case(pipelines=12, stages=4, micro_batches=12 * 8, memory="1f1b")


@st.composite
def wide(draw: st.DrawFn) -> Case:
    """Many pipelines, few failures."""
    D, P = draw(st.integers(4, 9)), draw(st.integers(1, 4))
    slots = st.builds(Slot, st.integers(0, D - 1), st.integers(0, P - 1))
    price = st.sampled_from((0.0, 0.5, 1.0, 2.0))
    return Case(
        pipelines=D,
        stages=P,
        micro_batches=draw(st.integers(D, 5 * D)),
        failed=draw(st.frozensets(slots, max_size=3)),
        costs=Costs(forward=draw(st.tuples(*[price] * P)), weight=draw(price), reduce=draw(price), send=draw(price)),
        split=draw(st.booleans()),
        stagger=draw(st.booleans()),
        memory=draw(st.sampled_from((None, "1f1b", 2))),
    )


@given(wide())
def test_a_plan_made_in_part_can_run_and_takes_no_longer_than_it_says(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GREEDY, "LARGE", 0)
        found = greedy(case)
    report = check(found.plan)
    assert report.peak_activations == found.peak_activations
    assert all(peak <= case.cap(worker % case.stages) for worker, peak in enumerate(found.peak_activations))
    spent = duration(case, found.plan)
    assert bound(case) <= spent * (1 + 1e-9)
    assert spent <= found.slots * (1 + 1e-9)
    assert case.stagger or found.slots == pytest.approx(spent)


@given(wide())
def test_without_a_failure_every_pipeline_runs_the_lists_of_one(case: Case) -> None:
    healthy = replace(case, failed=frozenset())
    found = greedy(healthy)
    check(found.plan)
    assert found.slots == pytest.approx(duration(healthy, found.plan))
    assert found.slots == greedy(solo(healthy)).slots


@pytest.mark.parametrize("failed", [{Slot(3, 1)}, {Slot(3, 1), Slot(7, 2)}, {Slot(3, 1), Slot(7, 1), Slot(3, 3)}])
def test_pipelines_that_a_failure_does_not_concern_keep_their_lists(
    failed: set[Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GREEDY, "LARGE", 0)
    monkeypatch.setattr("culm.plan.alike._MANY", 0)
    case = replace(WIDE, failed=frozenset(failed))
    healthy = greedy(WIDE)
    few = concerned(case, healthy.slots)
    assert {slot.pipeline for slot in failed} < set(few)
    assert len(few) < WIDE.pipelines
    changed = {
        worker // WIDE.stages
        for worker, (new, old) in enumerate(zip(greedy(case).plan.workers, healthy.plan.workers, strict=True))
        if new != old
    }
    assert changed <= set(few)


def test_as_many_help_as_keep_the_bound_and_no_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("culm.plan.alike._MANY", 0)
    case = replace(WIDE, failed=frozenset({Slot(0, 1)}), memory=None)
    few = concerned(case, 0.0)
    assert bound(part(case, few)) <= bound(case) * (1 + 1e-9)
    assert bound(part(case, few[:-1])) > bound(case)
