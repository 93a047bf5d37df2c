"""Loader processes deliver the same micro-batches, and an error with the item if they die or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests import tiny_jobs
from torch import Tensor

from culm.errors import LayerFailed
from culm.job import Job
from culm.runtime.clock import RealClock
from culm.runtime.compute.batch_loading import MicroBatchPrefetcher, load_micro_batch
from culm.runtime.compute.loader_pool import LoaderPool
from culm.runtime.compute.rng import sample_indices
from culm.testing import Faults, reference, simulate


class Augmented:
    """Items with random noise."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return tiny_jobs.DATA[index][0] + torch.rand(4), tiny_jobs.DATA[index][1]


class Broken(Augmented):
    """One item does something else."""

    def __init__(self, index: int, act: Any) -> None:
        self.index, self.act = index, act

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.index:
            self.act()
        return super().__getitem__(index)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("bad item")


@contextlib.contextmanager
def pool_of(job: Job) -> Iterator[LoaderPool]:
    with contextlib.closing(LoaderPool(job, lambda s, m: load_micro_batch(job, s, m, torch.device("cpu")))) as pool:
        yield pool


@pytest.mark.real
def test_a_run_with_loaders_equals_the_reference_through_a_loss() -> None:
    job = tiny_jobs.job(data=Augmented(), loaders=2, exact=True)
    wanted = reference(job)
    for faults in (Faults(), Faults().kill(1, at="1B1", step=1)):
        found = simulate(job, pipelines=2, stages=2, strategy="reroute", faults=faults)
        assert (found.losses, found.state_sha256) == (wanted.losses, wanted.state_sha256)
        assert found.summary["samples_lost"] == found.summary["samples_duplicated"] == 0


@pytest.mark.real
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (kill_self, "a loader process was killed by SIGKILL while it loaded item"),
        (lambda: time.sleep(600), "a loader did not deliver item"),
        (fail, "Job.data raised ValueError for item"),
        (lambda: os._exit(3), "a loader process ended with status 3 while it loaded item"),
    ],
)
def test_a_loader_that_dies_hangs_or_fails_is_an_error_that_names_the_item(act: Any, message: str) -> None:
    plain = tiny_jobs.job()
    items = sample_indices(plain, 0, 2)
    job = tiny_jobs.job(data=Broken(items[1], act), loaders=2, loader_timeout=1.0)
    with pool_of(job) as pool:
        pool.request([(0, micro) for micro in range(4)])
        pool.take(0, 1)
        with pytest.raises(LayerFailed, match=message) as caught:
            pool.take(0, 2)
    assert str(items) in str(caught.value)


@pytest.mark.real
def test_a_wait_in_another_thread_ends_when_the_processes_are_killed() -> None:
    """An epoch may end while a worker waits for a loader."""
    item = sample_indices(tiny_jobs.job(), 0, 0)[0]
    job = tiny_jobs.job(data=Broken(item, lambda: time.sleep(600)), loaders=1)
    with pool_of(job) as pool, ThreadPoolExecutor(1) as threads:
        pool.add(0, 0)
        waiting = threads.submit(pool.wait, 0, 0)
        pool.kill()
        assert isinstance(waiting.exception(), LayerFailed)


@pytest.mark.real
def test_with_loaders_a_worker_loads_no_item_itself() -> None:
    """A holder that repeats an action asks a loader, too: the item may have ended a process before."""
    job = tiny_jobs.job(data=Broken(sample_indices(tiny_jobs.job(), 0, 2)[0], kill_self), loaders=1)
    prefetcher = MicroBatchPrefetcher(job, torch.device("cpu"), RealClock(), [0, 1])
    with contextlib.closing(prefetcher):
        prefetcher.start_step(0)
        assert prefetcher.must_wait(0, 2)
        with pytest.raises(LayerFailed, match="was killed by SIGKILL"):
            prefetcher.wait(0, 2)


@pytest.mark.real
def test_micro_batches_are_taken_in_any_order_and_processes_end() -> None:
    job = tiny_jobs.job(data=Augmented(), loaders=2)
    with pool_of(job) as pool:
        pool.request([(step, micro) for step in (0, 1) for micro in range(4)])
        pids = [loader._pid for loader in pool._loaders]
        for step, micro in ((1, 3), (0, 0), (0, 3), (1, 0)):
            (found,), _, _ = pool.take(step, micro)
            (wanted,), _, _ = load_micro_batch(job, step, micro, torch.device("cpu"))
            assert torch.equal(found, wanted)
        assert not pool.has(0, 0)
        assert pool.has(0, 1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
