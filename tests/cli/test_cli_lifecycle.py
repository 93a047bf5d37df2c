"""However a run ends, nothing is left running."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .command import Training, children, one_sentence

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked")]

Start = Callable[..., Training]


def test_an_interrupt_ends_everything(training: Start) -> None:
    run = training()
    assert len(run.everyone) == 3 + 2 * 2  # launcher, nursery and etcd; agent and worker of each node
    code, said = run.end(run.process.pid, signal.SIGINT)
    assert code == 130
    assert "interrupted before the first checkpoint" in one_sentence(said)
    assert run.left() == []


def test_a_request_to_terminate_ends_everything_and_says_how_to_go_on(training: Start, tmp_path: Path) -> None:
    run = training("--out", str(tmp_path / "a"), "--checkpoint-every", "1")
    while not list(tmp_path.glob("a/checkpoints/*/manifest.json")):
        assert run.process.poll() is None
    code, said = run.end(run.process.pid, signal.SIGTERM)
    assert code == 143
    assert f"steps are saved: continue with --resume {tmp_path / 'a'}" in one_sentence(said)
    assert run.left() == []


# Whatever is killed where it leads and where it does not: tests/cluster/test_real_nodes.py. Here: that it is told.
VICTIMS = pytest.mark.parametrize(
    ("victim", "whole"), [(0, True), (1, False)], ids=["agent of node 0", "worker of node 1"]
)


@VICTIMS
def test_a_process_that_is_killed_ends_the_run_with_a_sentence(training: Start, victim: int, whole: bool) -> None:
    run = training("--strategy", "none")
    agent = run.agents[victim]
    code, said = run.end(agent if whole else children(agent)[0])
    assert code == 1
    assert f"culm: node {victim}" in one_sentence(said)
    assert "vanished" in said
    assert run.left() == []


@VICTIMS
def test_unless_told_otherwise_a_run_goes_on_without_a_process_that_is_killed(
    training: Start, victim: int, whole: bool
) -> None:
    run = training()
    agent = run.agents[victim]
    os.kill(agent if whole else children(agent)[0], signal.SIGKILL)
    assert run.line("node ") == f"node {victim} is gone"
    assert f"went on without node {victim}, by shadow" in run.line("step ", "went on")
    code, said = run.end(run.process.pid, signal.SIGINT)
    assert code == 130
    assert "interrupted" in one_sentence(said)
    assert run.left() == []


def test_a_nursery_that_is_killed_ends_the_run_with_a_sentence(training: Start) -> None:
    run = training()
    code, said = run.end(run.nursery)
    assert code == 1
    assert "the nursery of local nodes has ended" in one_sentence(said)
    assert run.left() == []


def test_when_the_launcher_is_killed_nothing_outlives_it(training: Start) -> None:
    run = training()
    code, _ = run.end(run.process.pid)
    assert code == -signal.SIGKILL
    assert run.left() == []
