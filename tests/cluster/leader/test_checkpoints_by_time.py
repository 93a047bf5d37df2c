"""Without --checkpoint-every, a run with a folder is saved every few minutes, however long its steps take."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import cached_setup, reference_result
from tests.tiny_jobs import job, linear

from culm.cluster.leader.timed_steps import TimedSteps
from culm.testing import Faults, SimulatedRun
from culm.testing.simulated_cluster import run_prepared

STEPS = 40
JOB = job(layers=[linear] * 4, steps=STEPS, exact=True)
MINUTES_S = 300.0


def run(out: Path, faults: Faults | None = None, *, action_s: float = 4.0, **request: Any) -> SimulatedRun:
    setup = cached_setup(JOB, out=str(out), **{"pipelines": 2, "stages": 2, **request})
    return run_prepared(JOB, setup, faults=faults or Faults(), cost=lambda *_: action_s, latency=0.001)


def unsaved_s(out: Path) -> float:
    """The longest time between two checkpoints, or between a checkpoint and the start or end of the run."""
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    times: list[float] = [line["t"] for line in lines if line["kind"] in ("run_started", "checkpoint", "finished")]
    return max(after - before for before, after in itertools.pairwise(times))


def step_s(out: Path) -> float:
    times: list[float] = [json.loads(line)["t"] for line in (out / "steps.jsonl").read_text().splitlines()]
    return max(after - before for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("strategy", ["auto", "reroute", "shadow-lazy", "none"])
def test_a_run_is_saved_every_few_minutes(strategy: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"pipelines": 1} if strategy == "none" else {}
    found = run(tmp_path, strategy=strategy, **shape)
    assert found.state_sha256 == reference_result(JOB).state_sha256
    assert unsaved_s(tmp_path) < MINUTES_S + 4 * step_s(tmp_path)


def test_a_run_of_seconds_is_saved_at_its_end(tmp_path: Path) -> None:
    assert run(tmp_path, action_s=0.01, strategy="reroute").summary["checkpoints"] == [STEPS]


def test_the_time_to_the_next_checkpoint_outlives_the_leader(tmp_path: Path) -> None:
    """Two leaders are lost: one right after it has chosen a checkpoint."""
    faults = Faults().kill(0, at="commit", step=9).join(1, step=10).kill(1, at="commit", step=20)
    found = run(tmp_path, faults, strategy="reroute", reconfigure="never")
    assert found.state_sha256 == reference_result(JOB).state_sha256
    assert unsaved_s(tmp_path) < MINUTES_S + 5 * step_s(tmp_path)


def test_steps_given_by_the_user_are_kept(tmp_path: Path) -> None:
    found = run(tmp_path, strategy="reroute", checkpoint_every=30)
    assert found.summary["checkpoints"] == [30, STEPS]


def test_the_last_chosen_step_is_remembered_and_earlier_ones_are_not() -> None:
    steps = TimedSteps(10.0)
    steps.start(0.0)
    for now in (10.0, 20.0, 30.0):
        assert steps.choose(now, int(now), int(now) + 1, 100) == int(now) + 2
        steps.record(now)
    steps.forget_before(31)
    assert steps.from_step(0) == (22, 32)
