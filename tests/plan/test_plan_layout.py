"""Who runs and who shadows what when slots are empty."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.plan.layout import Layout, Replica, World, ahead, arrange_around, first_layout, orphaned
from culm.schedule import Plan, check, generate

SHAPES = [(1, 2, 2), (1, 4, 4), (2, 1, 2), (2, 3, 5), (3, 2, 6), (3, 3, 7)]


def world(plan: Plan, strategy: str, lost: set[int]) -> World:
    """After the first losses: the own stage, and what the strategy keeps beside it."""
    held = {slot: {slot % plan.stages} for slot in range(len(plan.workers)) if slot not in lost}
    for replica in first_layout(plan, strategy):
        if replica.slot in held:
            held[replica.slot].add(replica.stage)
    return World(plan=plan, strategy=strategy, held={slot: frozenset(stages) for slot, stages in held.items()})


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any losses that leave each stage a holder."""
    D, P, M = draw(st.sampled_from(SHAPES))
    able = [*(["shadow", "shadow-lazy"] if P > 1 else []), *(["reroute"] if D > 1 else [])]
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zb", "interleaved"]))
    M += -M % (D * P) if schedule == "interleaved" else 0
    ranges = 2 if schedule == "interleaved" else 1
    plan = generate(schedule, pipelines=D, stages=P, micro_batches=M, ranges=ranges)
    strategy = draw(st.sampled_from(able))
    dice = Random(draw(st.integers(0, 2**32 - 1)))
    lost: set[int] = set()
    for slot in dice.sample(range(D * P), dice.randint(0, D * P - 1)):
        if not orphaned(world(plan, strategy, lost | {slot})):
            lost.add(slot)
    return world(plan, strategy, lost)


@given(worlds())
def test_the_plan_around_the_holes_is_one_that_the_checker_accepts(given: World) -> None:
    layout = arrange_around(given)
    check(layout.plan)
    assert Plan.from_text(layout.plan.to_text()) == layout.plan


@given(worlds())
def test_every_stage_is_run_by_workers_that_hold_it_and_by_all_of_its_own(given: World) -> None:
    layout = arrange_around(given)
    for stage in range(given.plan.stages):
        runners = layout.runners[stage]
        assert runners == layout.plan.holders_of(stage)
        assert all(stage in given.held[slot] for slot in runners)
        own = {slot for slot in given.held if slot % given.plan.stages == stage and stage in given.held[slot]}
        assert own <= set(runners)


@given(worlds())
def test_a_copy_lies_beside_the_runners_and_hears_from_one_of_them(given: World) -> None:
    layout = arrange_around(given)
    copies = [(replica.slot, replica.stage) for replica in layout.replicas]
    assert len(copies) == len(set(copies))
    for replica in layout.replicas:
        assert replica.slot in given.held
        assert replica.slot not in layout.runners[replica.stage]
        assert replica.source in layout.runners[replica.stage]
        assert replica.fresh == (replica.stage not in given.held[replica.slot])


@given(worlds())
def test_afterwards_every_stage_has_two_holders_wherever_there_are_two_workers(given: World) -> None:
    layout = arrange_around(given)
    for stage in range(given.plan.stages):
        assert len(holders(layout, stage)) >= min(2, len(given.held)), f"stage {stage} is left unprotected"


def holders(layout: Layout, stage: int) -> set[int]:
    return {*layout.runners[stage], *(replica.slot for replica in layout.replicas if replica.stage == stage)}


@given(worlds())
def test_a_micro_batch_is_at_home_with_a_runner_of_its_stage(given: World) -> None:
    layout = arrange_around(given)
    for (segment, _), slot in layout.home.items():
        assert slot in layout.runners[segment % given.plan.stages]


@given(worlds())
def test_who_stands_in_goes_on_doing_so_when_nobody_more_is_lost(given: World) -> None:
    """A connection that broke is no reason to move anything."""
    first = arrange_around(given)
    again = arrange_around(
        World(plan=given.plan, strategy=given.strategy, held=given.held, running=first.plan),
    )
    assert again.plan == first.plan
    assert again.runners == first.runners


# The words of the strategies

PLAN = generate("1f1b", pipelines=2, stages=3, micro_batches=4)


def test_a_worker_shadows_its_successor_and_the_last_one_the_first() -> None:
    alone = generate("1f1b", pipelines=1, stages=3, micro_batches=3)
    assert first_layout(alone, "shadow") == (Replica(1, 0, 1), Replica(2, 1, 2), Replica(0, 2, 0))
    assert len(first_layout(PLAN, "shadow-lazy")) == 6
    assert first_layout(PLAN, "reroute") == ()


@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
def test_a_shadow_stands_in_though_there_are_peers(strategy: str) -> None:
    layout = arrange_around(world(PLAN, strategy, {4}))
    assert (layout.source, layout.runners[1]) == ("shadow", (1, 3))
    assert layout.plan.stages_of(3) == (0, 1)


def test_peers_share_what_a_lost_worker_would_have_run() -> None:
    layout = arrange_around(world(PLAN, "reroute", {4}))
    assert (layout.source, layout.runners[1], layout.plan.held) == ("peers", (1,), ())


def test_where_the_shadow_is_lost_too_the_peers_do() -> None:
    layout = arrange_around(world(PLAN, "shadow", {3, 4}))
    assert layout.runners[1] == (1,) or 3 not in layout.runners[1]
    assert all(layout.runners.values())


def test_peers_first_and_a_new_copy_where_a_stage_would_have_one_holder() -> None:
    layout = arrange_around(world(PLAN, "reroute", {4}))
    assert [(r.stage, r.fresh) for r in layout.replicas] == [(1, True)]
    assert layout.replicas[0].slot != 1


def test_a_stage_that_nobody_holds_is_named() -> None:
    assert orphaned(world(PLAN, "reroute", {1, 4})) == [1]
    assert orphaned(world(PLAN, "shadow", {1, 4})) == []
    assert orphaned(world(PLAN, "shadow", {0, 1, 3, 4})) == [1]


@pytest.mark.parametrize("copies", [{0}, {0, 1}], ids=["nobody has a copy", "who has a copy stands in"])
def test_nothing_is_planned_ahead_where_a_stage_has_lost_all_of_its_own(copies: set[int]) -> None:
    plan = generate("zb", pipelines=2, stages=2, micro_batches=4)
    left = World(plan=plan, strategy="reroute", held={0: frozenset(copies), 2: frozenset({0})})
    assert list(ahead(left)) == []


def test_where_every_stage_has_one_of_its_own_the_next_losses_are_planned_for_that_leave_it_so() -> None:
    plan = generate("zb", pipelines=3, stages=2, micro_batches=6)
    made = list(ahead(world(plan, "reroute", {1, 3})))
    assert {rerouted.plan.failed for rerouted in made} == {(0, 1, 3), (1, 2, 3), (1, 3, 4)}


@pytest.mark.parametrize("shuffled", [{0: 1, 1: 0}, {0: 1, 1: 0, 2: 1, 3: 0}, {2: 1, 5: 0}])
def test_workers_that_have_moved_into_each_others_slots_run_every_action_once(shuffled: dict[int, int]) -> None:
    full = generate("1f1b", pipelines=3, stages=2, micro_batches=6)
    held = {slot: frozenset((shuffled.get(slot, slot % 2),)) for slot in range(6)}
    plan = arrange_around(World(plan=full, strategy="reroute", held=held, running=full)).plan
    assert plan.placement().keys() == full.placement().keys()
    assert all(plan.stages_of(slot) == (stage,) for slot, stage in shuffled.items())
