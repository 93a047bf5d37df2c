"""Soak: real processes under real faults learn what the failure-free run does, and growing processes are found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from culm.cli import main
from culm.soak.process_samples import ProcessSample, SampleFile, memory_growth
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


def test_samples_are_kept_in_a_file(tmp_path: Path) -> None:
    file, some = SampleFile(tmp_path / "processes.csv"), samples("worker", 1, 0.0)[:3]
    assert file.read() == []
    file.add(some[:2])
    file.add(some[2:])
    assert file.read() == some


def test_the_plot_has_memory_files_and_processes() -> None:
    text = plot_samples(samples("worker", 1, 0.0)[::60] + samples("agent", 2, 0.0)[::60], "title")
    assert text.startswith("<svg")
    assert all(word in text for word in ("resident memory", "open files", "processes", ">worker<", ">agent<"))


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
