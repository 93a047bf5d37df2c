"""How a worker's process is set up for the machine that it finds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from multiprocessing import Pipe

import pytest

from culm.providers import node


def faulted(how: str) -> int:
    """MB that a process takes from the kernel for 64 MB that it had and gave up before."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.cluster.takes_memory", how], capture_output=True, text=True, check=True
    )
    return int(made.stdout)


@pytest.mark.usefixtures("forked")
@pytest.mark.real
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="an allocator without switches")
def test_memory_that_a_micro_batch_gave_up_is_there_for_the_next() -> None:
    assert faulted("give") >= 32
    assert faulted("keep") <= 4


@pytest.mark.parametrize(("cores", "seconds"), [(2, 0.0), (4, 0.0), (5, 0.02), (16, 0.02)])
def test_a_worker_watches_for_frames_where_it_takes_no_core_from_others(
    monkeypatch: pytest.MonkeyPatch, cores: int, seconds: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert node._look_out(4) == seconds


def test_a_worker_whose_agent_was_killed_at_its_birth_ends_without_a_word() -> None:
    """What it was told before it counts."""
    lives: list[str] = []
    for told in ((), (b"10.0.0.7:4000",)):
        ours, theirs = Pipe()
        for word in told:
            ours.send_bytes(word)
        ours.close()
        node._when_told(theirs, lives.append)
        theirs.close()
    assert lives == ["10.0.0.7:4000"]
