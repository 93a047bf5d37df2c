"""Time per epoch of the modes with distant workers, in virtual time."""

from __future__ import annotations

import pytest
from tests.gnn.virtual_time import VirtualTimeRun

SERVER_MS = 16 * 1.6
"""Steps of all intervals on the server: the lower bound of every mode."""


def test_pipe_saves_a_round_trip_and_async_the_wait_for_neighbours() -> None:
    times = [VirtualTimeRun(mode, latency_ms=100.0).ms_per_epoch() for mode in ("sync", "pipe", "async")]
    assert times[0] > 1.7 * times[1]
    assert times[1] > times[2]


def test_staleness_one_hides_the_round_trip_behind_the_servers_work() -> None:
    pipe_ms = VirtualTimeRun("pipe", latency_ms=20.0).ms_per_epoch()
    stale_ms = VirtualTimeRun("async", 1, latency_ms=20.0).ms_per_epoch()
    assert stale_ms < 1.15 * SERVER_MS
    assert pipe_ms > 1.9 * stale_ms


@pytest.mark.parametrize("latency", [50.0, 100.0])
def test_one_round_trip_per_epoch_cannot_be_hidden(latency: float) -> None:
    stale_ms = VirtualTimeRun("async", 1, latency_ms=latency).ms_per_epoch()
    assert latency < stale_ms < latency + 10.0
