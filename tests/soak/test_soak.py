"""Soak: real processes under real faults learn what the failure-free run does, and growing processes are found."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from pathlib import Path

import pytest

from culm.cli import main
from culm.soak.process_samples import (
    ProcessSample,
    SampleFile,
    memory_growth,
    own_memory,
    sample_processes,
    total_growth,
)
from culm.soak.soak_run import plot_samples, run_soak


@pytest.mark.real
@pytest.mark.waits(30)
def test_a_short_soak_learns_what_the_failure_free_run_does(tmp_path: Path) -> None:
    result = run_soak(20.0, 5, tmp_path / "soak")
    assert result.problems == []
    assert result.steps > 20
    assert sum(result.faults.values()) >= 2
    assert (result.summary["samples_lost"], result.summary["samples_duplicated"]) == (0, 0)
    assert {sample.role for sample in result.samples} >= {"supervisor", "fork server", "leader", "agent", "worker"}


def samples(role: str, pid: int, mb_per_h: float, *, start: float = 0.0) -> list[ProcessSample]:
    """Ten minutes of a process; in its first minute it grows fast, and once it jumps."""
    found = []
    for t in range(600):
        mb = 100 + min(t, 60) + mb_per_h * t / 3600 + (5 if t > 500 else 0)
        found.append(ProcessSample(start + t, pid, role, round(mb * 1e6), 10))
    return found


def test_growth_is_that_after_the_warm_up_and_without_jumps() -> None:
    both = samples("worker", 1, 0.0) + samples("agent", 2, 30.0, start=100.0)
    fastest, other = memory_growth(both, warm_up_s=60.0, min_observed_s=300.0)
    assert (fastest.role, other.role) == ("agent", "worker")
    assert fastest.mb_per_h == pytest.approx(30.0, abs=10.0)
    assert other.mb_per_h == pytest.approx(0.0, abs=1.0)


def test_a_process_that_was_observed_too_briefly_does_not_count() -> None:
    assert memory_growth(samples("worker", 1, 30.0)[:300], warm_up_s=60.0, min_observed_s=300.0) == []


def test_a_change_of_role_is_no_growth_in_a_role_but_growth_in_total() -> None:
    """An agent that grows by 30 MB when it becomes the leader, and not after."""
    led = [sample._replace(t=600 + sample.t, role="leader", memory=sample.memory + 30 * 10**6) for sample in flat(100)]
    (agent, leader) = memory_growth(flat(100) + led, warm_up_s=60.0, min_observed_s=300.0)
    assert (agent.mb_per_h, leader.mb_per_h) == (0.0, 0.0)
    (total,) = total_growth(flat(100) + led, warm_up_s=60.0)
    assert (total.roles, total.mb) == (("agent", "leader"), 30.0)


def test_growth_in_total_is_that_between_the_warm_up_and_the_end() -> None:
    (grown,) = total_growth(samples("worker", 1, 36.0), warm_up_s=60.0)
    assert grown.mb == pytest.approx(5 + 36 * 540 / 3600, abs=0.2)
    assert grown.observed_s == 539


def flat(mb: int) -> list[ProcessSample]:
    """Ten minutes of an agent that does not grow."""
    return [ProcessSample(float(t), 1, "agent", mb * 10**6, 10) for t in range(600)]


def test_pages_of_files_are_not_memory_of_a_process() -> None:
    """Of a real process, that maps a file and reads all of it."""
    rollup = "55d-7ff ---p 0 00:00 0 [rollup]\nRss: 900 kB\nPss_Shmem: 20 kB\nAnonymous: 300 kB\nLocked: 0 kB\n"
    assert own_memory(rollup) == 320 * 1024
    before = next(sample_processes(0.0, {os.getpid(): "worker"}))
    with tempfile.TemporaryFile() as file:
        file.write(bytes(64 << 20))
        file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[::4096]) == 0
            after = next(sample_processes(1.0, {os.getpid(): "worker"}))
    kept = bytearray(b"x") * (64 << 20)
    grown = next(sample_processes(2.0, {os.getpid(): "worker"}))
    assert after.memory - before.memory < 16 << 20
    assert grown.memory - after.memory > 48 << 20
    del kept


def test_samples_are_kept_in_a_file(tmp_path: Path) -> None:
    file, some = SampleFile(tmp_path / "processes.csv"), samples("worker", 1, 0.0)[:3]
    assert file.read() == []
    file.add(some[:2])
    file.add(some[2:])
    assert file.read() == some


def test_the_plot_has_memory_files_and_processes() -> None:
    text = plot_samples(samples("worker", 1, 0.0)[::60] + samples("agent", 2, 0.0)[::60], "title")
    assert text.startswith("<svg")
    assert all(word in text for word in ("memory of the largest", "open files", "processes", ">worker<", ">agent<"))


@pytest.mark.parametrize("minutes", ["0", "-1"])
def test_a_duration_is_more_than_nothing(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["soak", "--minutes", minutes])
    assert f"--minutes is {minutes}" in capsys.readouterr().err


def test_a_folder_with_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").write_text(json.dumps({}))
    with pytest.raises(SystemExit, match="2"):
        main(["soak", "--out", str(tmp_path)])
    assert "is not an empty folder" in capsys.readouterr().err
