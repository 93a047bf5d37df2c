"""A worker that hangs under a live agent owes a sign, and is found."""

from __future__ import annotations

import pytest

from culm.cluster.vigil import Vigil
from culm.plan.lineage import Standing
from culm.runtime.epoch import Beat, Report


def beaten(vigil: Vigil, nodes: str, *, since: float, until: float, epoch: int = 1, slowest_s: float = 0.0) -> None:
    """Nodes beat once a second."""
    for second in range(round(since), round(until) + 1):
        for node in map(int, nodes):
            vigil.heard(Beat(node, epoch, second, slowest_s), float(second))


def test_who_stops_beating_while_others_beat_on_is_found_after_twice_suspect_after() -> None:
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "012", since=0, until=10)
    beaten(vigil, "02", since=11, until=20)
    assert vigil.silent(20.0) == []
    beaten(vigil, "02", since=21, until=22)
    assert vigil.silent(22.0) == [1]


def test_a_worker_is_given_as_long_as_five_of_its_longest_actions() -> None:
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "01", since=0, until=10, slowest_s=4.0)
    beaten(vigil, "0", since=11, until=38)
    assert vigil.silent(38.0) == []
    beaten(vigil, "0", since=39, until=45)
    assert vigil.silent(45.0) == [1]


def test_what_is_known_of_actions_beforehand_counts_from_the_first_beat_on() -> None:
    vigil = Vigil(5.0, 10.0)
    beaten(vigil, "01", since=0, until=1)
    beaten(vigil, "0", since=2, until=50)
    assert vigil.silent(50.0) == []


def test_where_nobody_beats_nobody_is_found() -> None:
    """The epoch may be over, or this agent may have been the one that slept."""
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "01", since=0, until=10)
    assert vigil.silent(1000.0) == []


def test_who_has_not_beaten_in_an_epoch_yet_is_given_a_minute() -> None:
    """Its letter may still be on the way: the store may have been out of reach."""
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "01", since=0, until=10)
    vigil.expect(2, [0, 1], 10.5)
    beaten(vigil, "0", since=11, until=70, epoch=2)
    assert vigil.silent(70.0) == []
    beaten(vigil, "0", since=71, until=71, epoch=2)
    assert vigil.silent(71.0) == [1]


def test_a_beat_may_come_before_the_epoch_is_known_of() -> None:
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "0", since=0, until=0)
    vigil.expect(1, [0, 1], 0.5)
    beaten(vigil, "1", since=1, until=11)
    assert vigil.silent(11.0) == [0]


def test_of_those_whom_an_earlier_leader_knew_who_does_not_answer_the_first_halt_is_found() -> None:
    vigil = Vigil(5.0, 0.0)
    vigil.expect(4, [0, 1, 2], 0.0)
    for node in (0, 2):
        vigil.heard(Report(node, 5, Standing()), 1.0)
    assert vigil.silent(61.0) == []
    assert vigil.silent(61.5) == [1]


def test_who_does_not_answer_a_halt_that_others_answered_is_found() -> None:
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "012", since=0, until=10)
    for node in (0, 2):
        vigil.heard(Report(node, 2, Standing()), 11.0)
    assert vigil.silent(20.0) == []
    assert vigil.silent(22.0) == [1]
    vigil.heard(Report(1, 2, Standing()), 22.5)
    assert vigil.silent(23.0) == []


def test_an_answer_to_an_earlier_halt_is_none() -> None:
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "01", since=0, until=10)
    vigil.heard(Report(0, 3, Standing()), 11.0)
    vigil.heard(Report(1, 2, Standing()), 11.0)
    assert vigil.silent(30.0) == [1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_beats_of_earlier_epochs_say_nothing(epoch: int) -> None:
    vigil = Vigil(5.0, 0.0)
    beaten(vigil, "01", since=0, until=10, epoch=2)
    beaten(vigil, "0", since=11, until=30, epoch=2)
    beaten(vigil, "1", since=11, until=30, epoch=epoch)
    assert vigil.silent(30.0) == [1]
