"""Real runs whose storage fails for a moment, and Ctrl-C in culm.train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import JOBS, LIMIT_S, EndlessRun

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def saved(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("checkpoints/*/manifest.json")}


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_half_a_second_without_the_checkpoint_folder_does_not_end_a_run(
    training: Callable[..., EndlessRun], tmp_path: Path
) -> None:
    out = tmp_path / "a"
    run = training("--out", str(out), "--checkpoint-every", "20", "--strategy", "none")
    wait_for(lambda: saved(out))
    (out / "checkpoints").rename(tmp_path / "away")
    (out / "checkpoints").write_text("")  # as an unmounted path: nothing can be written below it
    wait_for(lambda: events(out, "storage_failed"))
    time.sleep(0.5)
    (out / "checkpoints").unlink()
    (tmp_path / "away").rename(out / "checkpoints")
    before = saved(out)
    wait_for(lambda: events(out, "storage_recovered") and saved(out) - before)
    assert run.process.poll() is None
    assert events(out, "storage_failed")[0]["path"] == f"{out}/checkpoints"
    code, error = run.signal_and_wait(run.process.pid, signal.SIGINT)
    assert (code, "steps are saved: continue with --resume" in error) == (130, True)


def test_ctrl_c_in_culm_train_writes_a_checkpoint_first(tmp_path: Path) -> None:
    out = tmp_path / "a"
    program = f"""
import culm
try:
    culm.train({JOBS + ":endless"!r}, stages=2, out={str(out)!r})
except KeyboardInterrupt as interrupt:
    print(interrupt, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        wait_for(lambda: (out / "steps.jsonl").exists() and (out / "steps.jsonl").read_text())
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        said, error = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    steps = len((out / "steps.jsonl").read_text().splitlines())
    assert said == f"interrupted; {steps} steps are saved: continue with --resume {out}\n"
    assert "writing a checkpoint at the next step boundary" in error
