"""How a worker's process is set up for the machine that it finds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from culm.cluster.run_setup import RunResult, encode
from culm.providers import node_process
from culm.providers.fork_server import fork
from culm.providers.run_events import event_line
from culm.providers.run_handle import RunHandle


def faulted(how: str) -> int:
    """MB that a process takes from the kernel for 64 MB that it had and gave up before."""
    made = subprocess.run(
        [sys.executable, "-m", "tests.providers.memory_reuse_process", how], capture_output=True, text=True, check=True
    )
    return int(made.stdout)


@pytest.mark.usefixtures("forked_programs")
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
    assert node_process._busy_wait_s(4) == seconds


def test_a_worker_whose_agent_was_killed_at_its_birth_ends_without_a_word() -> None:
    """What it was told before it counts."""
    lives: list[str] = []
    for told in ((), (b"10.0.0.7:4000",)):
        ours, theirs = Pipe()
        for word in told:
            ours.send_bytes(word)
        ours.close()
        node_process._wait_for_address(theirs, lives.append)
        theirs.close()
    assert lives == ["10.0.0.7:4000"]


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(3), "ended with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "ended by SIGTERM"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), None),
    ],
    ids=["exit", "signal", "kill"],
)
def test_the_exit_of_a_worker_is_reported_unless_it_was_killed(end: Callable[[], None], told: str | None) -> None:
    worker = fork(end)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert node_process._describe_child_exit(worker) == told
    os.waitpid(worker, 0)


def test_what_a_worker_died_of_is_in_the_news_and_in_the_end() -> None:
    async def main() -> tuple[list[Any], str]:
        anything: Any = None
        run = RunHandle(anything, anything, anything)
        run._handle_change("ended/1", b"ended by SIGSEGV")
        run._handle_change("nodes/1", None)
        run._handle_change("result", encode(RunResult(error="NodeLost", message="node 0 vanished")))
        return run.pending_events(), (await run.wait_for_result()).message

    news, message = asyncio.run(main())
    assert [event_line(each) for each in news] == ["node 1 is gone: its worker ended by SIGSEGV"]
    assert message == "node 0 vanished; the worker of node 1 had ended by SIGSEGV"
