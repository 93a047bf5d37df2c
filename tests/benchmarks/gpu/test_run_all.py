"""`run_all.sh` goes on after a step that fails, saves each result, and continues where it stopped; with a stand-in for
the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "run_all.sh"
STAND_IN = """#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
*torch,*culm*) [[ -z ${NO_CULM:-} ]] || { echo "ModuleNotFoundError: No module named 'xxhash'"; exit 1; } ;;
*--rows\\ zb-4*) echo "no such luck" >&2; exit 3 ;;
*--json\\ --rows*) echo '{"rows": []}' ;;
*--combine*) echo "combined $*" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return {**os.environ, "PYTHON": str(stand_in), "CALLS": str(tmp_path / "calls")}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), "--cpu", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_failed_step_does_not_stop_the_others_and_is_tried_again(environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run(environment, "--out", str(out), "1f1b-4", "zb-4", "2x2")
    assert found.returncode == 1
    assert "== 1f1b-4: ok" in found.stdout
    assert "no such luck\n== zb-4: FAILED (status 3)" in found.stdout
    assert "== 2x2: ok" in found.stdout
    assert sorted(path.name for path in out.glob("*.done")) == ["1f1b-4.done", "2x2.done"]
    assert "1f1b-4.json" in (out / "all.json").read_text()
    again = run(environment, "--out", str(out), "1f1b-4", "zb-4")
    assert "== 1f1b-4: done before" in again.stdout
    assert "== zb-4: FAILED" in again.stdout


def test_another_machine_continues_with_the_archive(environment: dict[str, str], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run(environment, "--out", str(first), "1f1b-4")
    archive = first / "results.tar.gz"
    with tarfile.open(archive) as packed:
        assert {"./1f1b-4.json", "./1f1b-4.log", "./1f1b-4.done"} <= set(packed.getnames())
    found = run(environment, "--out", str(second), "--resume", str(archive), "1f1b-4", "2x2")
    assert "== 1f1b-4: done before" in found.stdout
    assert "== 2x2: ok" in found.stdout
    assert "1f1b-4.json" in (second / "all.json").read_text()


def test_steps_that_take_too_long_are_left_for_the_next_call(environment: dict[str, str], tmp_path: Path) -> None:
    found = run(environment, "--out", str(tmp_path / "out"), "--limit", "50", "1f1b-4", "pause-reroute")
    assert "== 1f1b-4: left out, it takes about 60 s" in found.stdout
    assert "--rows" not in (tmp_path / "calls").read_text()


def test_an_interpreter_that_cannot_run_culm_is_an_error_with_the_fix(
    environment: dict[str, str], tmp_path: Path
) -> None:
    found = run({**environment, "NO_CULM": "1"}, "--out", str(tmp_path / "out"), "1f1b-4")
    assert found.returncode == 1
    assert "cannot run culm: ModuleNotFoundError: No module named 'xxhash'. Bring what is missing" in found.stderr


def test_the_interpreter_of_the_tests_can_run_culm(environment: dict[str, str], tmp_path: Path) -> None:
    found = run({**environment, "PYTHON": sys.executable}, "--out", str(tmp_path / "out"), "--limit", "0")
    assert found.returncode == 0, found.stderr


def test_all_steps_are_known(environment: dict[str, str], tmp_path: Path) -> None:
    found = run(environment, "--out", str(tmp_path / "out"), "--limit", "0")
    assert found.stdout.count("left out") == 22
