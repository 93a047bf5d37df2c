from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import pairwise
from typing import Any

import pytest
from benchmarks.common.cpu_pinning import available_cores, pin_processes
from benchmarks.resilience.compute_job import BLOCKS_PER_STAGE, ComputeJob
from benchmarks.resilience.parallel_runs import ParallelRuns


class Idle:
    """Replaces a fork server: these runs need none."""

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def no_nurseries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.resilience.parallel_runs.ForkServerClient", Idle)


def test_two_fork_servers_run_two_tasks_at_once_and_results_are_in_order() -> None:
    both = threading.Barrier(2, timeout=30)
    first: Any = Idle()

    def work(fork_server: Any) -> int:
        both.wait()
        return id(fork_server)

    with ParallelRuns(first, 2) as lanes:
        result = lanes.run_all([work] * 4)
        assert lanes.run_all([lambda _, n=n: n for n in range(5)]) == [0, 1, 2, 3, 4]  # type: ignore[misc]
    assert len(set(result)) == 2
    assert id(first) in result


def test_an_error_of_a_run_reaches_the_caller_and_the_fork_server_stays_usable() -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("lost")

    first: Any = Idle()
    with ParallelRuns(first, 1) as lanes:
        with pytest.raises(RuntimeError, match="lost"):
            lanes.run_all([fails])
        assert lanes.run_all([id]) == [id(first)]


def test_each_process_is_pinned_to_its_own_core_if_there_are_enough() -> None:
    cores = available_cores()
    assert sorted(cores) == sorted(os.sched_getaffinity(0))
    sleepers = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in cores]
    try:
        pin_processes([one.pid for one in sleepers] * 2)
        assert all(os.sched_getaffinity(one.pid) == set(cores) for one in sleepers)
        pin_processes([one.pid for one in sleepers])
        assert [os.sched_getaffinity(one.pid) for one in sleepers] == [{core} for core in cores]
    finally:
        for one in sleepers:
            one.kill()
            one.communicate()


def test_the_stages_of_the_computed_job_have_as_many_blocks_each() -> None:
    work = ComputeJob(stages=3, micro_batches=12, steps=7)
    job = work.build_job()
    assert (len(job.layers), job.steps, job.micro_batches) == (3 * BLOCKS_PER_STAGE + 2, 7, 12)
    edges = [1, *work.cuts, len(job.layers) - 1]
    assert [b - a for a, b in pairwise(edges)] == [BLOCKS_PER_STAGE] * 3
