"""However a run ends, nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.cli_process import EndlessRun, children, one_sentence

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]

Start = Callable[..., EndlessRun]


def test_an_interrupt_ends_everything(training: Start) -> None:
    run = training()
    assert len(run.all_pids) == 4 + 2 * 2  # launcher, supervisor, fork server and etcd; agent and worker of each node
    code, said = run.signal_and_wait(run.process.pid, signal.SIGINT)
    assert code == 130
    assert "interrupted before the first checkpoint" in one_sentence(said)
    assert run.still_running() == []


def test_a_request_to_terminate_ends_everything_and_says_how_to_go_on(training: Start, tmp_path: Path) -> None:
    run = training("--out", str(tmp_path / "a"), "--checkpoint-every", "1")
    while not list(tmp_path.glob("a/checkpoints/*/manifest.json")):
        assert run.process.poll() is None
    code, said = run.signal_and_wait(run.process.pid, signal.SIGTERM)
    assert code == 143
    assert f"steps are saved: continue with --resume {tmp_path / 'a'}" in one_sentence(said)
    assert run.still_running() == []


@pytest.mark.parametrize("strategy", ["shadow", "none"])
def test_an_interrupt_of_a_run_with_a_folder_saves_the_steps_that_are_done(
    training: Start, tmp_path: Path, strategy: str
) -> None:
    out = tmp_path / "a"
    run = training("--out", str(out), "--strategy", strategy)
    assert not list(out.glob("checkpoints/*"))
    os.kill(run.process.pid, signal.SIGINT)
    said = run.next_line("interrupted: writing a checkpoint at the next step boundary")
    assert said.endswith("is done); press Ctrl-C again to exit at once")
    _, error = run.process.communicate(timeout=60)
    assert run.process.returncode == 130
    steps = len((out / "steps.jsonl").read_text().splitlines())
    assert f"interrupted; {steps} steps are saved: continue with --resume {out}" in one_sentence(error)
    assert run.still_running() == []
    assert json.loads((out / "summary.json").read_text())["checkpoints"][-1] == steps


def test_a_second_interrupt_does_not_wait_for_the_checkpoint(training: Start, tmp_path: Path) -> None:
    """A checkpoint folder that cannot be written: the run would wait for it."""
    out = tmp_path / "a"
    run = training("--out", str(out))
    (out / "checkpoints").write_text("")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.next_line("interrupted: writing")
    assert run.next_line(f"{out}/checkpoints cannot be written")
    time.sleep(0.5)  # a signal that follows at once counts as the same one
    code, error = run.signal_and_wait(run.process.pid, signal.SIGINT)
    assert code == 130
    assert "interrupted before the first checkpoint" in one_sentence(error)
    assert run.still_running() == []


# tests/providers/test_local_nodes_real.py kills every process, leader or not. Here: the command reports it.
VICTIMS = pytest.mark.parametrize(
    ("victim", "whole"), [(0, True), (1, False)], ids=["agent of node 0", "worker of node 1"]
)


@VICTIMS
def test_a_process_that_is_killed_ends_the_run_with_a_sentence(training: Start, victim: int, whole: bool) -> None:
    run = training("--strategy", "none")
    agent = run.agents[victim]
    code, said = run.signal_and_wait(agent if whole else children(agent)[0])
    assert code == 1
    assert f"culm: node {victim}" in one_sentence(said)
    assert "was lost" in said
    assert run.still_running() == []


@VICTIMS
def test_by_default_a_run_continues_without_a_process_that_is_killed(training: Start, victim: int, whole: bool) -> None:
    run = training()
    agent = run.agents[victim]
    os.kill(agent if whole else children(agent)[0], signal.SIGKILL)
    assert run.next_line("node ") == f"node {victim} is gone"
    assert f"went on without node {victim}, by shadow" in run.next_line("step ", "went on")
    code, said = run.signal_and_wait(run.process.pid, signal.SIGINT)
    assert code == 130
    assert "interrupted" in one_sentence(said)
    assert run.still_running() == []


def test_a_nursery_that_is_killed_ends_the_run_with_a_sentence(training: Start) -> None:
    run = training()
    code, said = run.signal_and_wait(run.fork_server_pid)
    assert code == 1
    assert "the fork server of local nodes has ended" in one_sentence(said)
    assert run.still_running() == []


def test_when_the_launcher_is_killed_nothing_outlives_it(training: Start) -> None:
    run = training()
    code, _ = run.signal_and_wait(run.process.pid)
    assert code == -signal.SIGKILL
    assert run.still_running() == []
