"""Measurements in parallel, each in a process with its own cores."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
from benchmarks.common.cpu_pinning import available_cores
from benchmarks.common.isolated_processes import IsolatedTask, run_isolated

from culm.errors import RunError, UsageError

HERE = available_cores()[:2]
pytestmark = pytest.mark.skipif(len(HERE) < 2, reason="this machine has one core")


def cores_here() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def meet(mine: str, other: str) -> list[int]:
    """A barrier that only processes running at the same time can pass."""
    Path(mine).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    return cores_here()


def alone(folder: str, name: str) -> list[str]:
    """The other processes that run at the same time."""
    (Path(folder) / name).touch()
    there = sorted(path.name for path in Path(folder).iterdir())
    (Path(folder) / name).unlink()
    return there


def refuse() -> None:
    raise UsageError("no")


def vanish() -> None:
    os._exit(7)


def write_pid(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def fail_after(path: str) -> None:
    while not (Path(path).exists() and Path(path).read_text()):
        time.sleep(0.01)
    refuse()


def test_two_tasks_with_one_core_each_run_at_the_same_time_on_different_cores(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first, second = run_isolated([IsolatedTask(1, partial(meet, a, b)), IsolatedTask(1, partial(meet, b, a))], HERE)
    assert sorted(first + second) == sorted(HERE)


def test_a_task_that_needs_more_cores_than_there_are_gets_all(tmp_path: Path) -> None:
    works = [IsolatedTask(9, partial(alone, str(tmp_path), name)) for name in ("a", "b")]
    assert run_isolated(works, HERE) == [["a"], ["b"]]


def test_results_are_reported_as_they_come_and_returned_in_order() -> None:
    told: list[list[int]] = []
    result = run_isolated([IsolatedTask(2, cores_here), IsolatedTask(1, cores_here)], HERE, told.append)
    assert result[0] == sorted(HERE)
    assert len(result[1]) == 1
    assert sorted(told) == sorted(result)


def test_an_error_of_one_task_ends_the_others(tmp_path: Path) -> None:
    path = str(tmp_path / "pid")
    with pytest.raises(UsageError, match="no"):
        run_isolated([IsolatedTask(1, partial(write_pid, path)), IsolatedTask(1, partial(fail_after, path))], HERE)
    assert not Path(f"/proc/{Path(path).read_text()}").exists()


def test_a_task_that_dies_is_an_error() -> None:
    with pytest.raises(RunError, match="exit code 7"):
        run_isolated([IsolatedTask(1, vanish)], HERE)
