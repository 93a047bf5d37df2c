"""A planned schedule is improved while the run goes on: the better plan is adopted at a step boundary, through kills
too, and no bit of the result changes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cached_runs import cached_setup, reference_result, with_split_plan
from tests.testing.small_job import job

from culm.cluster.run_setup import RunSetup
from culm.job import Job
from culm.schedule import Plan, check_plan, one_f_one_b
from culm.testing import Faults
from culm.testing.survival_check import run_and_compare

STEPS = 24


@functools.cache
def long_job() -> Job:
    return job(steps=STEPS, exact=True)


def slow_setup(out: Path, *, work: float = 0.05, strategy: str = "reroute") -> RunSetup:
    """A run that starts with 1F1B where the planner knows a shorter plan."""
    setup = cached_setup(long_job(), pipelines=2, stages=3, strategy=strategy)
    planned = with_split_plan(setup)
    slow = one_f_one_b(pipelines=2, stages=3, micro_batches=Plan.from_text(setup.plan).micro_batches)
    return msgspec.structs.replace(planned, plan=slow.to_text(), improve_plan=work, out=str(out))


def events(out: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] in kinds]


def train(setup: RunSetup, faults: Faults | None = None) -> None:
    run_and_compare(long_job(), setup, faults or Faults(), 0, reference_result(long_job()))


def test_a_better_plan_is_adopted_at_a_step_boundary_with_its_gain(tmp_path: Path) -> None:
    train(slow_setup(tmp_path))
    improved, reshaped = events(tmp_path, "plan_improved", "reshaped")
    assert 0.01 < improved["gain"] < 0.5
    assert "s per step predicted instead of" in improved["why"]
    assert reshaped["layers"] == 0, "no layer moves"


def test_the_same_run_is_improved_in_the_same_way_each_time(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        train(slow_setup(tmp_path / name))
        found.append([(e["step"], e["gain"]) for e in events(tmp_path / name, "plan_improved")])
    assert found[0] == found[1] != []


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy"])
@pytest.mark.parametrize("moment", ["1F0", "inventory", "adopt", "1S"])
def test_kills_around_the_change_of_the_plan_change_nothing(tmp_path: Path, strategy: str, moment: str) -> None:
    step = None if moment in ("inventory", "adopt") else 4
    faults = Faults().kill(1, at=moment, step=step, nth=2 if moment == "adopt" else 1).join(1, step=6)
    train(slow_setup(tmp_path, strategy=strategy), faults)
    assert events(tmp_path, "plan_improved")


def test_without_a_better_plan_the_event_says_so(tmp_path: Path) -> None:
    setup = slow_setup(tmp_path)
    best = with_split_plan(cached_setup(long_job(), pipelines=2, stages=3, strategy="reroute")).plan
    check_plan(Plan.from_text(best))
    train(msgspec.structs.replace(setup, plan=best))
    assert not events(tmp_path, "plan_improved")
    assert [event["why"] for event in events(tmp_path, "plan_kept")] == [
        "the solver found no plan that is shorter by 1 % or more"
    ]


def test_a_gain_that_the_remaining_steps_do_not_repay_is_left(tmp_path: Path) -> None:
    """The change takes about as long as a step, and this run has four steps left when the plan is known."""
    short = job(steps=6, exact=True)
    setup = msgspec.structs.replace(slow_setup(tmp_path), steps=6)
    run_and_compare(short, setup, Faults(), 0, reference_result(short))
    assert not events(tmp_path, "plan_improved", "plan_kept", "reshaped")


def test_with_0_seconds_the_plan_is_not_improved(tmp_path: Path) -> None:
    train(slow_setup(tmp_path, work=0.0))
    assert not events(tmp_path, "plan_improved", "plan_kept", "reshaped")
