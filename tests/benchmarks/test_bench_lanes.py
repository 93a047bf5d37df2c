from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import pairwise
from typing import Any

import pytest
from benchmarks.computed import BLOCKS, Computed
from benchmarks.lanes import Lanes
from benchmarks.pinned import pin, places


class Idle:
    """In place of a nursery: these runs need none."""

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def no_nurseries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.lanes.LocalNursery", Idle)


def test_two_lanes_run_two_at_once_each_in_a_nursery_of_its_own_and_answer_in_order() -> None:
    both = threading.Barrier(2, timeout=30)
    first: Any = Idle()

    def work(nursery: Any) -> int:
        both.wait()
        return id(nursery)

    with Lanes(first, 2) as lanes:
        found = lanes.map([work] * 4)
        assert lanes.map([lambda _, n=n: n for n in range(5)]) == [0, 1, 2, 3, 4]  # type: ignore[misc]
    assert len(set(found)) == 2
    assert id(first) in found


def test_what_a_run_raises_reaches_the_caller_and_the_lane_serves_the_next() -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("lost")

    first: Any = Idle()
    with Lanes(first, 1) as lanes:
        with pytest.raises(RuntimeError, match="lost"):
            lanes.map([fails])
        assert lanes.map([id]) == [id(first)]


def test_each_process_is_pinned_to_a_core_of_its_own_where_there_are_enough() -> None:
    cores = places()
    assert sorted(cores) == sorted(os.sched_getaffinity(0))
    sleepers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in cores]
    try:
        pin([one.pid for one in sleepers] * 2)
        assert all(os.sched_getaffinity(one.pid) == set(cores) for one in sleepers)
        pin([one.pid for one in sleepers])
        assert [os.sched_getaffinity(one.pid) for one in sleepers] == [{core} for core in cores]
    finally:
        for one in sleepers:
            one.kill()
            one.communicate()


def test_the_stages_of_the_computed_job_have_as_many_blocks_each() -> None:
    work = Computed(stages=3, micro_batches=12, steps=7)
    job = work.job()
    assert (len(job.layers), job.steps, job.micro_batches) == (3 * BLOCKS + 2, 7, 12)
    edges = [1, *work.cuts, len(job.layers) - 1]
    assert [b - a for a, b in pairwise(edges)] == [BLOCKS] * 3
