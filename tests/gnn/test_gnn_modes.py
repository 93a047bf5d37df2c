"""What the modes are for: time per epoch where workers are far, in virtual time."""

from __future__ import annotations

import pytest
from tests.gnn.virtual import Clockwork

SERVER_MS = 16 * 1.6
"""All intervals' steps of a server: no mode can be faster."""


def test_pipelining_saves_a_way_to_far_workers_and_asynchrony_the_waiting_for_neighbours() -> None:
    times = [Clockwork(mode, latency_ms=100.0).ms_per_epoch() for mode in ("sync", "pipe", "async")]
    assert times[0] > 1.7 * times[1]
    assert times[1] > times[2]


def test_a_pass_of_staleness_hides_the_way_to_workers_behind_the_work_of_the_server() -> None:
    pipe, stale = Clockwork("pipe", latency_ms=20.0).ms_per_epoch(), Clockwork("async", 1, latency_ms=20.0)
    found = stale.ms_per_epoch()
    assert found < 1.15 * SERVER_MS
    assert pipe > 1.9 * found


@pytest.mark.parametrize("latency", [50.0, 100.0])
def test_what_can_not_be_hidden_is_one_way_an_epoch(latency: float) -> None:
    found = Clockwork("async", 1, latency_ms=latency).ms_per_epoch()
    assert latency < found < latency + 10.0
