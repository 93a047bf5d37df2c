"""All timeouts are derived from one setting and are consistent."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cluster.timeouts import Timeouts, derive_timeouts, timeout_table
from culm.errors import UsageError


@given(st.floats(0.1, 600), st.floats(0, 1000))
def test_every_setting_that_is_allowed_gives_timeouts_in_order(suspect_after: float, slowest: float) -> None:
    times = derive_timeouts(suspect_after, slowest_action=slowest)
    assert times.heartbeat < times.suspect_after <= times.lease < times.confirm_loss
    assert times.keepalive + 2 * times.store_call <= times.lease
    assert times.lease >= 2
    assert times.lease == int(times.lease)
    assert times.progress > slowest


@given(st.floats(0.1, 300), st.floats(1, 2))
def test_a_longer_setting_makes_no_timeout_shorter(suspect_after: float, factor: float) -> None:
    short, long = derive_timeouts(suspect_after), derive_timeouts(suspect_after * factor)
    assert all(getattr(short, field.name) <= getattr(long, field.name) for field in fields(Timeouts))


@pytest.mark.parametrize("wrong", [0.0, -1.0, 0.05, 601.0, float("nan"), float("inf")])
def test_a_setting_out_of_range_is_refused_with_the_range(wrong: float) -> None:
    with pytest.raises(UsageError, match=r"suspect_after is .*: give seconds from 0.1 to 600"):
        derive_timeouts(wrong)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"heartbeat": 2.0},
            r"3 x heartbeat \(6 s\) must not be above suspect_after \(5 s\): one late heartbeat is not a failure",
        ),
        ({"lease": 1.0}, r"the shortest lease \(2 s\) must not be above lease \(1 s\): etcd grants none below 2 s"),
        ({"lease": 3.0}, r"suspect_after \(5 s\) must not be above lease \(3 s\)"),
        ({"store_call": 4.0}, r"keepalive \+ 2 x store_call \(9.66667 s\) must not be above lease \(5 s\)"),
        ({"progress": 1.0}, r"suspect_after \(5 s\) must not be above progress \(1 s\)"),
        ({"confirm_loss": 1.0}, r"lease \(5 s\) must not be above confirm_loss \(1 s\)"),
        ({"end": 60.0}, r"end \(60 s\) must not be above drain \(10 s\)"),
        ({"adopt": 0.0}, r"adopt is 0.0 s: use a timeout above zero"),
        ({"connect": float("nan")}, r"connect is nan s: use a timeout above zero"),
        ({"ping": 1.0}, r"ping is not a timeout: choose one of suspect_after, heartbeat, "),
    ],
)
def test_timeouts_out_of_order_are_refused_in_one_sentence(changed: dict[str, float], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        derive_timeouts(5.0, **changed)


def test_the_table_has_every_timeout_with_its_meaning() -> None:
    rows = timeout_table(derive_timeouts(5.0))
    assert [name for name, _, _ in rows] == [field.name for field in fields(Timeouts)]
    assert ("lease", 5.0, "a node's keys stay in the store after its last keepalive") in rows
