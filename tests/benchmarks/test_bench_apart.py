"""Measurements side by side, each in a process with cores of its own."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
from benchmarks.apart import Work, apart
from benchmarks.pinned import places

from culm.errors import RunError, UsageError

HERE = places()[:2]
pytestmark = pytest.mark.skipif(len(HERE) < 2, reason="this machine has one core")


def cores_here() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def meet(mine: str, other: str) -> list[int]:
    """Only those who run at the same time get out of this."""
    Path(mine).touch()
    while not Path(other).exists():
        time.sleep(0.01)
    return cores_here()


def alone(folder: str, name: str) -> list[str]:
    """Who else is there while this runs."""
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


def test_two_that_need_a_core_each_run_at_the_same_time_on_different_ones(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first, second = apart([Work(1, partial(meet, a, b)), Work(1, partial(meet, b, a))], HERE)
    assert sorted(first + second) == sorted(HERE)


def test_one_that_needs_more_cores_than_there_are_has_all_of_them_to_itself(tmp_path: Path) -> None:
    works = [Work(9, partial(alone, str(tmp_path), name)) for name in ("a", "b")]
    assert apart(works, HERE) == [["a"], ["b"]]


def test_results_are_told_as_they_come_and_given_in_order() -> None:
    told: list[list[int]] = []
    found = apart([Work(2, cores_here), Work(1, cores_here)], HERE, told.append)
    assert found[0] == sorted(HERE)
    assert len(found[1]) == 1
    assert sorted(told) == sorted(found)


def test_an_error_of_one_ends_the_others(tmp_path: Path) -> None:
    path = str(tmp_path / "pid")
    with pytest.raises(UsageError, match="no"):
        apart([Work(1, partial(write_pid, path)), Work(1, partial(fail_after, path))], HERE)
    assert not Path(f"/proc/{Path(path).read_text()}").exists()


def test_one_that_vanishes_is_an_error_and_not_a_wait() -> None:
    with pytest.raises(RunError, match="exit code 7"):
        apart([Work(1, vanish)], HERE)
