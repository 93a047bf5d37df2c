"""Recovery from whatever a halted run leaves behind: carried out without tensors, it completes every step."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from culm.plan.lineage import Cell, Standing, lineage
from culm.plan.recover import Scene, recover
from culm.schedule import Kind, generate

from .halted import Regrouped, regrouped, replayed

SHAPES = [(1, 2, 2), (1, 3, 3), (2, 2, 4), (2, 3, 4), (3, 2, 5)]


@st.composite
def cases(draw: st.DrawFn) -> Regrouped:
    """A plan, a strategy that has a holder for what is lost, and a moment."""
    D, P, M = draw(st.sampled_from(SHAPES))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb", "interleaved"]))
    strategy = draw(st.sampled_from(["shadow", "shadow-lazy"] if D == 1 else ["shadow", "shadow-lazy", "reroute"]))
    M += -M % (D * P) if schedule == "interleaved" else 0
    plan = generate(schedule, pipelines=D, stages=P, micro_batches=M, ranges=2 if schedule == "interleaved" else 1)
    return regrouped(plan, Random(draw(st.integers(0, 2**32 - 1))), strategy)


@given(cases())
def test_each_worker_can_run_its_list_with_what_it_has_and_what_it_is_sent_and_every_gradient_is_added_once(
    case: Regrouped,
) -> None:
    workers = replayed(case)
    complete = {(step, g) for step, g, _ in case.recovery.sums}
    for step, g in product(case.recovery.steps, range(case.plan.segments)):
        if (step, g) in complete:
            continue
        runners = case.recovery.runners[step][g]
        before = [case.left[slot].summed for slot in runners]
        added = Counter(c.micro for cells in (*before, *(workers[slot].summed for slot in runners)) for c in cells
                        if (c.step, c.segment) == (step, g))  # fmt: skip
        assert added == Counter(range(case.plan.micro_batches)), (step, g, added)


@given(cases())
def test_only_holders_run_anything_and_only_runners_add_to_sums(case: Regrouped) -> None:
    for slot, row in enumerate(case.recovery.lists):
        for task in case.recovery.tasks(slot) if row else ():
            stage = task.action.segment % case.plan.stages
            assert stage in case.left[slot].versions
            assert task.again or slot in case.recovery.runners[task.step][task.action.segment]


@given(cases())
def test_whose_sums_are_added_up_has_something_in_them(case: Regrouped) -> None:
    for step, by_segment in case.recovery.runners.items():
        for g, adding in enumerate(by_segment):
            assert set(adding) <= set(case.scene.runners[g % case.plan.stages])
            for slot in adding if len(adding) > 1 else ():
                tasks = case.recovery.tasks(slot)
                ran = [t.action.segment for t in tasks if t.step == step and t.action.kind in (Kind.W, Kind.B)]
                before = [cell.segment for cell in case.left[slot].summed if cell.step == step]
                assert g in (*ran, *before)


@given(cases())
def test_what_is_run_is_what_lineage_asks_for_each_lot_once_by_one_worker_in_its_order(case: Regrouped) -> None:
    """Tapes and sums of copies that are not needed do not count."""
    usable = {slot: _of_runners(case, slot) for slot in case.left}
    asked = partial(lineage, segments=case.plan.segments, micro_batches=case.plan.micro_batches)
    wanted = [
        Counter((lot.cell, lot.kinds, lot.again) for lot in asked(usable, case.recovery.steps, split=split).lots)
        for split in {case.scene.split, True}
    ]
    found: Counter[tuple[Cell, tuple[Kind, ...], bool]] = Counter()
    for slot in case.left:
        by_lot: dict[tuple[Cell, bool], list[Kind]] = {}
        for step, action, again in case.recovery.tasks(slot):
            cell = Cell(step, action.segment, action.micro or 0)
            by_lot.setdefault((cell, again), []).append(action.kind)
        found.update((cell, tuple(kinds), again) for (cell, again), kinds in by_lot.items())
    assert found in wanted


def _of_runners(case: Regrouped, slot: int) -> Standing:
    def run(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
        return tuple(c for c in cells if slot in case.scene.runners[c.segment % case.plan.stages])

    have = case.left[slot]
    return Standing(
        versions=have.versions,
        forwards=run(have.forwards),
        halves=run(have.halves),
        summed=run(have.summed),
        outputs=have.outputs,
        gradients=have.gradients,
        sums=have.sums,
    )


@given(cases())
def test_whoever_lacks_a_sum_gets_it_from_the_group_a_giver_or_the_source_of_its_copy(case: Regrouped) -> None:
    recovery = case.recovery
    replicas = {(replica.slot, replica.stage): replica for replica in case.layout.replicas if not replica.fresh}
    for step, g in product(recovery.steps, range(case.plan.segments)):
        stage = g % case.plan.stages
        giver, lacking = recovery.giver(step, g), recovery.lacking(step, stage)
        if giver is not None:
            assert (step, g) in case.left[giver].sums
            continue
        adding = recovery.runners[step][g]
        assert set(adding) <= set(lacking), "whoever adds up has not stepped yet"
        for slot in set(lacking) - set(case.scene.runners[stage]):
            assert replicas[slot, stage].source in case.scene.runners[stage]


@given(cases())
def test_no_forward_of_a_step_comes_before_the_gradients_of_the_step_before_in_its_stage(case: Regrouped) -> None:
    for slot in case.left:
        newest: dict[int, int] = {}
        for step, action, again in case.recovery.tasks(slot):
            stage = action.segment % case.plan.stages
            if not again:
                assert step >= newest.get(stage, step), f"slot {slot} goes back to step {step}"
                newest[stage] = step


@given(cases())
def test_the_same_reports_give_the_same_recovery(case: Regrouped) -> None:
    """Whoever leads comes to the same; also when the reports come in another order."""
    assert recover(case.scene, dict(reversed(case.left.items()))) == case.recovery


def test_where_nobody_has_begun_a_step_there_is_nothing_to_complete() -> None:
    scene = Scene(stages=2, segments=2, slots=2, micro_batches=2, runners={0: (0,), 1: (1,)}, first=5)
    found = recover(scene, {0: Standing(versions={0: 5}), 1: Standing(versions={1: 5})})
    assert (found.steps, found.lists, found.redone) == ((), ((), ()), 0)


def test_what_is_counted_as_redone_is_what_had_been_finished_before() -> None:
    """A stage of two is lost after its forward: that forward is run again; its backward had not been run."""
    cell = Cell(0, 0, 0)
    scene = Scene(stages=2, segments=2, slots=4, micro_batches=1, runners={0: (2,), 1: (1, 3)}, first=0)
    left = {
        1: Standing(versions={1: 0}, forwards=(cell._replace(segment=1),), outputs=(cell._replace(segment=1),)),
        2: Standing(versions={0: 0}),
        3: Standing(versions={1: 0}),
    }
    found = recover(scene, left)
    assert [str(task.action) for slot in range(4) for task in found.tasks(slot)] == ["1I0", "1W0", "0F0", "0I0", "0W0"]
    assert found.redone == 1
