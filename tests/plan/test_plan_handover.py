"""Handing over: who has notice ends what it has begun, if there is time, and gives its sums to one that stays."""

from __future__ import annotations

import math

import pytest

from culm.plan.lineage import Cell, Standing
from culm.plan.recover import Recovery, Scene, recover

STEP, MICRO_BATCHES = 5, 4
VERSIONS = [{0: STEP}, {1: STEP}, {0: STEP}, {1: STEP}]


def cells(segment: int, *micros: int) -> tuple[Cell, ...]:
    return tuple(Cell(STEP, segment, micro) for micro in micros)


def handed(begun: int, summed: int, patience: float = math.inf) -> Recovery:
    """2 x 2: the first worker, which is about to go, has added up some of the micro-batches of its pipeline and begun
    others; all that it sent has been used."""
    done, tapes = range(summed), range(summed, summed + begun)
    standings = {
        0: Standing(
            versions=VERSIONS[0],
            forwards=cells(0, *tapes),
            summed=cells(0, *done),
            outputs=cells(0, *done, *tapes),
            gradients=cells(0, *done),
        ),
        1: Standing(
            versions=VERSIONS[1],
            forwards=cells(1, *tapes),
            summed=cells(1, *done),
            outputs=cells(1, *done, *tapes),
            gradients=cells(1, *done),
        ),
        2: Standing(versions=VERSIONS[2]),
        3: Standing(versions=VERSIONS[3]),
    }
    scene = Scene(
        stages=2,
        segments=2,
        slots=4,
        micro_batches=MICRO_BATCHES,
        runners={0: (2,), 1: (1, 3)},
        first=STEP,
        leaving=[0],
        patience=patience,
    )
    return recover(scene, standings)


def actions(recovery: Recovery, slot: int) -> list[str]:
    return [action for _, action, _ in recovery.lists[slot]]


@pytest.mark.parametrize(("begun", "summed"), [(b, s) for b in range(3) for s in range(3) if b + s])
def test_with_time_who_leaves_ends_what_it_has_begun_and_nothing_is_redone(begun: int, summed: int) -> None:
    found = handed(begun, summed)
    assert sorted(actions(found, 0)) == sorted(f"0{kind}{m}" for m in range(summed, summed + begun) for kind in "IW")
    assert found.redone == 0
    run = sorted(action for slot in range(4) for action in actions(found, slot) if action.startswith("0W"))
    assert run == [f"0W{micro}" for micro in range(summed, MICRO_BATCHES)]


def test_what_it_waits_for_is_run_first() -> None:
    found = handed(begun=2, summed=0)
    assert {"1I0", "1I1"} == {action for action in actions(found, 1)[:4] if "I" in action}


@pytest.mark.parametrize(("begun", "summed", "given"), [(0, 1, True), (1, 0, True), (0, 0, False)])
def test_its_sums_go_to_a_runner_that_stays(begun: int, summed: int, given: bool) -> None:
    assert handed(begun, summed).parts == (((STEP, 0, 0, 2),) if given else ())


def test_without_time_what_it_has_begun_is_begun_anew_and_counted_and_its_sums_are_given_all_the_same() -> None:
    found = handed(begun=1, summed=1, patience=0.0)
    assert actions(found, 0) == []
    assert {"0F1", "0W1"} <= set(actions(found, 2))
    assert "0W0" not in actions(found, 2)
    assert found.redone == 1
    assert found.parts == ((STEP, 0, 0, 2),)


def test_it_ends_as_many_as_it_has_time_for() -> None:
    whole = len(actions(handed(begun=2, summed=0), 0))
    ended = [len(actions(handed(begun=2, summed=0, patience=units), 0)) for units in range(12)]
    assert ended == sorted(ended)
    assert {0, whole // 2, whole} == set(ended)


def test_nobody_waits_for_it_to_end_the_step() -> None:
    found = handed(begun=1, summed=1)
    assert found.versions[0] == {}
    assert 0 not in found.needy(STEP)
    assert found.runners == {STEP: ((2,), (1, 3))}
