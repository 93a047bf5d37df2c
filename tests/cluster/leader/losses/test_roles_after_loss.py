"""After a loss: protection is restored, workers move to balance the load, and the next plans are precomputed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.job import Job
from culm.schedule import Plan, check_plan
from culm.testing import Faults, SimulatedRun, reference, simulate


def hurt(described: Job, faults: Faults, out: Path, **request: Any) -> tuple[SimulatedRun, list[dict[str, Any]]]:
    """A run with the expected result, and its events."""
    run = simulate(described, faults=faults, out=str(out), cost=lambda *_: 0.01, latency=0.001, **request)
    assert run.state_sha256 == reference(described).state_sha256
    assert run.summary["samples"] == run.summary["samples_expected"]
    return run, [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def test_two_empty_slots_of_one_stage_are_spread_over_two_stages(tmp_path: Path) -> None:
    """A worker of another stage gets a copy of the layers, and then fills the slot."""
    described = job(steps=8, exact=True, global_batch=24)
    faults = Faults().kill((1, 4), at="1B1", step=1)
    _, events = hurt(described, faults, tmp_path, pipelines=3, stages=3, strategy="reroute")
    epochs = [event for event in events if event["kind"] == "epoch"]
    assert "will move" in epochs[1]["why"]
    assert "runs stage 1 from now on" in epochs[2]["why"]
    assert len([event for event in events if event["kind"] == "lost"]) == 2


def test_a_worker_does_not_move_if_it_is_the_last_holder_of_its_stage(tmp_path: Path) -> None:
    """The others of its stage are lost just when its copy of the other stage is complete."""
    described = job(steps=8, exact=True, global_batch=24)
    faults = Faults().kill((1, 4), at="1B1", step=1).kill((3, 6), at="inventory", nth=5)
    run, events = hurt(described, faults, tmp_path, pipelines=3, stages=3, strategy="reroute")
    epochs = [event.get("why", "") for event in events if event["kind"] == "epoch"]
    assert "slot 0 to stage 1 will move" in epochs[1]
    assert run.summary["preemptions"] == 4


def test_a_stage_with_one_holder_left_gets_a_second_one_before_anything_else(tmp_path: Path) -> None:
    described = job(steps=6, exact=True)
    faults = Faults().kill(1, at="1B0", step=1).kill(3, at="1B2", step=4)
    run, events = hurt(described, faults, tmp_path, pipelines=2, stages=2, strategy="reroute")
    assert next(event["stage"] for event in events if event["kind"] == "protected") == 1
    assert run.summary["preemptions"] == 2, "the copy took over when the last of the stage's own workers was lost"
    assert run.summary["at_risk_s"] > 0
    assert [recovered["source"] for recovered in run.summary["recoveries"]] == ["peers", "shadow"]
    assert "unplanned" not in [event["kind"] for event in events], "nothing is planned ahead without peers"


def test_the_plan_for_a_loss_is_precomputed(tmp_path: Path) -> None:
    described = job(steps=6, exact=True)
    faults = Faults().kill(2, at="0B2", step=1).kill(5, at="1B3", step=4)
    _, events = hurt(described, faults, tmp_path, pipelines=3, stages=2, strategy="reroute")
    assert [event.get("planned_ahead") for event in events if event["kind"] == "epoch"] == [None, True, True]


def test_an_error_in_precomputing_plans_is_an_event_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: object) -> Iterator[None]:
        raise RuntimeError("out of plans")
        yield

    monkeypatch.setattr("culm.cluster.leader.planning_calls.precompute_next_plans", failing)
    _, events = hurt(job(steps=3, exact=True), Faults(), tmp_path, pipelines=2, stages=2, strategy="reroute")
    (unplanned,) = [event for event in events if event["kind"] == "unplanned"]
    assert unplanned["why"] == "cannot precompute plans: RuntimeError: out of plans"


@pytest.mark.parametrize("kind", ["frame", "message"])
@pytest.mark.parametrize("nth", [1, 3])
def test_lost_messages_are_sent_again(tmp_path: Path, kind: Any, nth: int) -> None:
    """No node is lost, so no loss is reported: the missing progress is the only sign."""
    described = job(steps=4, exact=True)
    faults = Faults().drop_message(1, 0, nth=nth, kind=kind)
    run, events = hurt(described, faults, tmp_path, pipelines=2, stages=2, strategy="reroute")
    assert run.summary["preemptions"] == 0
    assert run.injected_faults
    stalled = [event for event in events if event["kind"] == "stalled"]
    assert len(stalled) <= 1, "once is enough"


def test_a_plan_with_a_moved_worker_is_valid() -> None:
    from culm.plan.recover.role_assignment import SurvivingCluster, assign_roles
    from culm.schedule import generate_plan
    from culm.strategies import get

    full = generate_plan("1f1b", pipelines=3, stages=3, micro_batches=12)
    held = {slot: frozenset({slot % 3}) for slot in range(9) if slot not in (1, 4)}
    held[2] = frozenset({1})
    layout = assign_roles(SurvivingCluster(full_plan=full, policy=get("reroute"), held_stages=held, current_plan=full))
    assert layout.plan.stages_of(2) == (1,)
    assert Plan.from_text(layout.plan.to_text()) == layout.plan
    check_plan(layout.plan)


def test_slow_loads_and_saves_are_not_restarted(tmp_path: Path) -> None:
    """Restarting them because nothing else progresses would restart them forever."""
    asked = {"pipelines": 2, "stages": 2, "strategy": "reroute", "suspect_after": 1.0}
    run, events = hurt(job(steps=3, exact=True), Faults().slow_disk(3, seconds=300.0), tmp_path, **asked)
    assert run.virtual_s > 300
    assert [event["kind"] for event in events if event["kind"] in ("epoch", "stalled", "lost")] == ["epoch"]


def test_a_halt_during_a_slow_write_ends_the_wait_and_not_the_write(tmp_path: Path) -> None:
    """Otherwise the next epoch would wait forever for a write that was abandoned."""
    described = job(steps=6, exact=True)
    faults = Faults().slow_disk(3, seconds=0.5).kill(1, at="1B0", step=3)
    asked = {"pipelines": 2, "stages": 2, "strategy": "reroute", "checkpoint_every": 1}
    run, events = hurt(described, faults, tmp_path, **asked)
    assert run.summary["checkpoints"][-1] == 6
    assert not [event for event in events if event["kind"] == "stalled"]
