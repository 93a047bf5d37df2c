"""Notices shorter than a step: sums and kept tensors are handed over in time, without waiting for the commit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.cached_runs import cached_setup, reference_result, run_with_faults
from tests.tiny_jobs import job, linear

from culm import Job
from culm.schedule import Plan
from culm.testing import Faults, SimulatedRun
from culm.testing.chaos import make_job
from culm.testing.simulated_cluster import run_prepared

ACTION_S, LATENCY_S = 0.01, 0.0005
STEP = 2
"""The step in which notices come; others precede it, and one follows."""
JOB = job(layers=[linear] * 3, exact=True, micro_batch=1, global_batch=16, steps=STEP + 2)
"""8 micro-batches per pipeline: a worker can finish what it has begun within a third of a step."""
SMALL = replace(JOB, global_batch=8)
SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}


def cost(node: int, step: int, action: str) -> float:
    """Compute actions take time; leaving and starting an epoch do not."""
    del node, step
    return ACTION_S if action[1] in "FBIW" else LATENCY_S


@pytest.fixture(scope="module")
def pace_s() -> float:
    """Virtual seconds of a failure-free step."""
    return run_prepared(JOB, cached_setup(JOB, **SHAPE), cost=cost, latency=LATENCY_S).virtual_s / JOB.steps


def every_action(described: Job, node: int, seconds: float) -> list[Faults]:
    """A notice at each action of a node, in a step after others whose duration is known."""
    actions = Plan.from_text(cached_setup(described, same_layers_as=JOB, **SHAPE).plan).workers[node]
    return [Faults().warn(node, seconds=seconds, at=str(action), step=STEP) for action in actions]


def survived(faults: Faults, described: Job = JOB, **request: Any) -> SimulatedRun:
    return run_with_faults(described, faults, cost=cost, latency=LATENCY_S, **{**SHAPE, **request})


def paid(run: SimulatedRun) -> list[tuple[list[int], int, str]]:
    """For each recovery: the lost nodes, the redone actions, and the source of the layers."""
    return [(r["lost"], r["redone_actions"], r["source"]) for r in run.summary["recoveries"]]


@pytest.mark.parametrize(("node", "first"), [(0, 0), (3, 1)])
def test_a_third_of_a_step_is_enough_to_hand_over_at_any_action(pace_s: float, node: int, first: int) -> None:
    """For a first and a last stage, at every second action."""
    for faults in every_action(JOB, node, 0.3 * pace_s)[first::2]:
        assert paid(survived(faults)) == [([node], 0, "notice")], faults


def test_a_leaving_node_goes_before_its_open_step_is_complete(pace_s: float) -> None:
    run = survived(Faults().warn(1, seconds=0.3 * pace_s, step=STEP, nth=8))
    happened = [entry.what for entry in run.history.entries]
    assert happened.index("nodes/1 is gone from the store") < happened.index(f"step {STEP} is committed")


def test_a_notice_of_zero_seconds_is_a_normal_loss_at_every_action() -> None:
    for faults in every_action(SMALL, 1, 0.0):
        assert [lost for lost, _, _ in paid(survived(faults, SMALL))] == [[1]], faults


def test_unfinished_actions_are_rerun_and_all_sums_are_kept(pace_s: float) -> None:
    at: dict[str, Any] = {"step": STEP, "nth": 12}
    brief, killed = (
        survived(faults) for faults in (Faults().warn(0, seconds=0.08 * pace_s, **at), Faults().kill(0, **at))
    )
    ((gone, again, source),), ((_, redone, _),) = paid(brief), paid(killed)
    assert (gone, source) == ([0], "notice")
    assert 0 < again < redone


@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
@pytest.mark.parametrize("node", range(3))
def test_with_one_pipeline_a_shadow_receives_the_handover(pace_s: float, node: int, strategy: str) -> None:
    faults = Faults().warn(node, seconds=pace_s, step=STEP, nth=9)
    assert paid(survived(faults, pipelines=1, stages=3, strategy=strategy)) == [([node], 0, "notice")]


@pytest.mark.parametrize(
    ("feature", "schedule", "node", "at"),
    [("batch norm", "1f1b", 1, "1B3"), ("weighted loss", "gpipe", 2, "2B5"), ("dropout", "gpipe", 2, "2B5")],
)
def test_forwards_that_a_shadow_ran_ahead_count_once_after_a_handover(
    feature: str, schedule: str, node: int, at: str
) -> None:
    """Statistics, losses and weights are handed over with a sum: the shadow must not add its own forwards to them."""
    described = replace(make_job((feature,), True, 8), steps=4)
    ways: dict[str, Any] = {"pipelines": 1, "stages": 3, "schedule": schedule, "strategy": "shadow"}
    faults = Faults().warn(node, seconds=0.1, at=at, step=2)
    run = survived(faults, described, **ways)
    assert [source for _, _, source in paid(run)] == ["notice"]
    assert run.losses == reference_result(described).losses


def test_the_recipient_of_a_handover_may_be_lost_too(pace_s: float) -> None:
    faults = Faults().warn(0, seconds=0.3 * pace_s, step=STEP, nth=8).kill(2, at="adopt", nth=2)
    run = survived(faults, pipelines=3)
    assert sorted(node for lost, _, _ in paid(run) for node in lost) == [0, 2]


def test_notices_shorter_than_a_step_may_overlap(pace_s: float) -> None:
    faults = Faults().warn((0, 3), seconds=0.4 * pace_s, step=STEP, nth=8)
    run = survived(faults)
    assert sorted(node for lost, _, _ in paid(run) for node in lost) == [0, 3]
    assert {source for _, _, source in paid(run)} == {"notice"}
