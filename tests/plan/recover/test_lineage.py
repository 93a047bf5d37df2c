"""Lineage finds the smallest set of actions: compared with a breadth-first search over all actions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.recover.interrupted_run import InterruptedRun, lose_random_workers

from culm.plan.recover.lineage import WorkerInventory, WorkItem, WorkKey, find_missing_work
from culm.schedule import Kind, generate_plan

# The state of a micro-batch in a segment: the five facts that actions need or produce.
TAPE, HALF, OUTPUT, GRADIENT, ADDED = range(5)
Column = tuple[tuple[bool, ...], ...]
"""By segment: the five facts."""


def fewest_actions(start: Column, split: bool) -> int:
    """The least number of actions until the gradient of each segment is in a sum, by breadth-first search."""
    front, seen, count = {start}, {start}, 0
    while not any(all(facts[ADDED] for facts in column) for column in front):
        front = {after for column in front for after in next_columns(column, split)} - seen
        seen |= front
        count += 1
        assert front, f"{start} cannot be completed"
    return count


def next_columns(column: Column, split: bool) -> Iterator[Column]:
    """All states that one action can lead to. A gradient is added once; a whole backward has no halves."""
    for g, (tape, half, _, _, added) in enumerate(column):
        fed = g == 0 or column[g - 1][OUTPUT]
        led = g == len(column) - 1 or column[g + 1][GRADIENT]
        if fed:
            yield with_facts(column, g, {TAPE: True, OUTPUT: True})
        if tape and led:
            yield with_facts(column, g, {TAPE: False, HALF: True, GRADIENT: True})
        if tape and led and not split and not added:
            yield with_facts(column, g, {TAPE: False, GRADIENT: True, ADDED: True})
        if half and not added:
            yield with_facts(column, g, {HALF: False, ADDED: True})


def with_facts(column: Column, g: int, facts: dict[int, bool]) -> Column:
    row = tuple(facts.get(number, value) for number, value in enumerate(column[g]))
    return (*column[:g], row, *column[g + 1 :])


def column_of(inventories: dict[int, WorkerInventory], step: int, micro: int, segments: int) -> Column:
    """What the survivors have of a micro-batch."""

    def has(name: str, key: WorkKey) -> bool:
        return any(key in getattr(inventory, name) for inventory in inventories.values())

    return tuple(
        (
            has("tapes_after_forward", key),
            has("tapes_after_input_grad", key),
            has("outputs", key),
            has("input_grads", key),
            has("accumulated_grads", key)
            or any((step, g) in inventory.complete_sums for inventory in inventories.values()),
        )
        for g in range(segments)
        for key in [WorkKey(step, g, micro)]
    )


def inventory_of(column: Column) -> WorkerInventory:
    """The same facts as the inventory of one survivor."""
    keys = [(WorkKey(0, g, 0), facts) for g, facts in enumerate(column)]
    lists = [tuple(key for key, facts in keys if facts[number]) for number in range(5)]
    return WorkerInventory(
        tapes_after_forward=lists[0],
        tapes_after_input_grad=lists[1],
        outputs=lists[2],
        input_grads=lists[3],
        accumulated_grads=lists[4],
    )


def action_count(items: tuple[WorkItem, ...]) -> int:
    return sum(len(item.kinds) for item in items)


def completes(column: Column, items: tuple[WorkItem, ...]) -> bool:
    """Whether running exactly these items, each as soon as possible, adds every gradient exactly once."""
    left = {item: list(item.kinds) for item in items}
    moved = True
    while moved:
        moved = False
        for item, kinds in left.items():
            g = item.key.segment
            for kind in list(kinds):
                fed = g == 0 or column[g - 1][OUTPUT]
                led = g == len(column) - 1 or column[g + 1][GRADIENT]
                if not {Kind.F: fed, Kind.W: True}.get(kind, led):
                    break
                facts = {Kind.F: {OUTPUT: True}, Kind.I: {GRADIENT: True}, Kind.W: {ADDED: True}}.get(kind)
                facts = facts or {GRADIENT: True, ADDED: True}
                assert not (facts.get(ADDED) and column[g][ADDED]), f"{item} adds a gradient twice"
                column = with_facts(column, g, facts)
                kinds.pop(0)
                moved = True
    return not any(left.values()) and all(facts[ADDED] for facts in column)


FACTS = tuple(product((False, True), repeat=5))
POSSIBLE_FACTS = tuple(facts for facts in FACTS if facts[GRADIENT] or not facts[HALF])
"""States in which a worker with half a backward has kept the gradient that it computed, as real workers do."""


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_every_possible_inventory_of_two_segments_is_completed_by_the_fewest_actions(split: bool) -> None:
    for column in product(FACTS if split else POSSIBLE_FACTS, repeat=2):
        result = find_missing_work({0: inventory_of(column)}, [0], segments=2, micro_batches=1, split=split)
        assert action_count(result.items) == fewest_actions(column, split), column
        assert completes(column, result.items), column


@given(st.lists(st.sampled_from(FACTS), min_size=3, max_size=4))
def test_any_inventory_of_more_segments_is_completed_by_the_fewest_actions(facts: list[tuple[bool, ...]]) -> None:
    column = tuple(facts)
    result = find_missing_work({0: inventory_of(column)}, [0], segments=len(column), micro_batches=1)
    assert action_count(result.items) == fewest_actions(column, True)
    assert completes(column, result.items)


@given(st.lists(st.sampled_from(POSSIBLE_FACTS), min_size=3, max_size=4))
def test_any_inventory_is_completed_by_the_fewest_actions_without_split_backward(facts: list[tuple[bool, ...]]) -> None:
    column = tuple(facts)
    result = find_missing_work({0: inventory_of(column)}, [0], segments=len(column), micro_batches=1, split=False)
    assert action_count(result.items) == fewest_actions(column, False)
    assert completes(column, result.items)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(1, 2, 2), (2, 2, 4), (2, 3, 4), (3, 2, 5)]),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb"]),
    shadows=st.booleans(),
)
def test_an_interrupted_run_is_completed_by_the_fewest_actions(
    seed: int, shape: tuple[int, int, int], schedule: str, shadows: bool
) -> None:
    """Two steps may be open. Micro-batches and steps are independent, so each is searched separately."""
    D, P, M = shape
    shadows = shadows or D == 1
    plan = generate_plan(schedule, pipelines=D, stages=P, micro_batches=M)
    rng = Random(seed)
    left = lose_random_workers(InterruptedRun(plan, rng, shadows=shadows).run_and_interrupt(), plan, rng)
    split = schedule == "zb"
    result = find_missing_work(left, [0, 1], segments=P, micro_batches=M, split=split)
    for step, micro in product((0, 1), range(M)):
        column = column_of(left, step, micro, P)
        items = tuple(item for item in result.items if (item.key.step, item.key.micro) == (step, micro))
        assert action_count(items) == fewest_actions(column, split), (step, micro, column)
        assert completes(column, items), (step, micro, column)


def test_nothing_is_run_if_nothing_is_missing() -> None:
    sums = WorkerInventory(complete_sums=((0, 0), (0, 1), (0, 2)))
    assert find_missing_work({0: sums}, [0], segments=3, micro_batches=4).items == ()


def test_everything_is_run_if_nothing_is_left() -> None:
    items = find_missing_work({0: WorkerInventory()}, [0], segments=3, micro_batches=2).items
    assert {item.key: item.kinds for item in items} == {
        WorkKey(0, g, m): (Kind.F, Kind.I, Kind.W) for g in range(3) for m in range(2)
    }
    assert not any(item.output_only for item in items)


def test_a_summed_gradient_is_not_added_again_if_only_its_output_is_needed() -> None:
    """The first stage is lost with its sum, and with the gradients that the second had sent to it."""
    have = WorkerInventory(accumulated_grads=(WorkKey(0, 1, 0),))
    items = find_missing_work({1: have}, [0], segments=2, micro_batches=1).items
    assert {(item.key.segment, item.kinds, item.output_only) for item in items} == {
        (0, (Kind.F, Kind.I, Kind.W), False),
        (1, (Kind.F, Kind.I), True),
    }


def test_an_item_with_a_tape_is_bound_to_the_tape_holder() -> None:
    have = {
        3: WorkerInventory(tapes_after_forward=(WorkKey(0, 0, 0),)),
        5: WorkerInventory(tapes_after_input_grad=(WorkKey(0, 1, 0),), input_grads=(WorkKey(0, 1, 0),)),
    }
    items = find_missing_work(have, [0], segments=2, micro_batches=1).items
    assert {(item.key.segment, item.kinds, item.tape_holder) for item in items} == {
        (0, (Kind.I, Kind.W), 3),
        (1, (Kind.W,), 5),
    }
