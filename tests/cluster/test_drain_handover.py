"""Notices shorter than a step: sums and kept tensors change hands within them, and nobody waits for the commit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.known import hurt, ready, truth

from culm import Job
from culm.schedule import Plan
from culm.testing import Faults, Simulated
from culm.testing.chaos import job_of
from culm.testing.cluster import enact

from .jobs import job, linear

ACTION_S, LATENCY_S = 0.01, 0.0005
STEP = 2
"""The one in which notices come: others have been seen before, and one follows."""
JOB = job(layers=[linear] * 3, exact=True, micro_batch=1, global_batch=16, steps=STEP + 2)
"""8 micro-batches a pipeline: what a worker has begun can be ended within a third of a step."""
SMALL = replace(JOB, global_batch=8)
SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}


def cost(node: int, step: int, action: str) -> float:
    """Work takes long; to leave an epoch, and to begin one, does not."""
    del node, step
    return ACTION_S if action[1] in "FBIW" else LATENCY_S


@pytest.fixture(scope="module")
def pace_s() -> float:
    """Virtual seconds of a step that nothing befalls."""
    return enact(JOB, ready(JOB, **SHAPE), cost=cost, latency=LATENCY_S).virtual_s / JOB.steps


def every_action(described: Job, node: int, seconds: float) -> list[Faults]:
    """A notice at each action of a node, in a step before which others have been seen."""
    actions = Plan.from_text(ready(described, like=JOB, **SHAPE).plan).workers[node]
    return [Faults().warn(node, seconds=seconds, at=str(action), step=STEP) for action in actions]


def survived(faults: Faults, described: Job = JOB, **request: Any) -> Simulated:
    return hurt(described, faults, cost=cost, latency=LATENCY_S, **{**SHAPE, **request})


def paid(run: Simulated) -> list[tuple[list[int], int, str]]:
    """Of each recovery: who is gone, what was redone, and where the layers were found."""
    return [(r["lost"], r["redone_actions"], r["source"]) for r in run.summary["recoveries"]]


@pytest.mark.parametrize(("node", "first"), [(0, 0), (3, 1)])
def test_a_third_of_a_step_is_enough_to_hand_over_at_any_action(pace_s: float, node: int, first: int) -> None:
    """Of a first stage, and of a last one: every second."""
    for faults in every_action(JOB, node, 0.3 * pace_s)[first::2]:
        assert paid(survived(faults)) == [([node], 0, "notice")], faults


def test_a_node_with_notice_is_gone_before_the_step_that_it_had_begun_is_complete(pace_s: float) -> None:
    run = survived(Faults().warn(1, seconds=0.3 * pace_s, step=STEP, nth=8))
    happened = [entry.what for entry in run.history.entries]
    assert happened.index("nodes/1 is gone from the store") < happened.index(f"step {STEP} is committed")


def test_a_notice_of_no_time_at_all_is_a_loss_like_any_other_at_every_action() -> None:
    for faults in every_action(SMALL, 1, 0.0):
        assert [lost for lost, _, _ in paid(survived(faults, SMALL))] == [[1]], faults


def test_what_there_is_no_time_to_end_is_begun_anew_and_all_that_was_summed_is_kept(pace_s: float) -> None:
    at: dict[str, Any] = {"step": STEP, "nth": 12}
    brief, killed = (
        survived(faults) for faults in (Faults().warn(0, seconds=0.08 * pace_s, **at), Faults().kill(0, **at))
    )
    ((gone, again, source),), ((_, redone, _),) = paid(brief), paid(killed)
    assert (gone, source) == ([0], "notice")
    assert 0 < again < redone


@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy"])
@pytest.mark.parametrize("node", range(3))
def test_a_shadow_inherits_where_there_is_one_pipeline(pace_s: float, node: int, strategy: str) -> None:
    faults = Faults().warn(node, seconds=pace_s, step=STEP, nth=9)
    assert paid(survived(faults, pipelines=1, stages=3, strategy=strategy)) == [([node], 0, "notice")]


@pytest.mark.parametrize(
    ("feature", "schedule", "node", "at"),
    [("batch norm", "1f1b", 1, "1B3"), ("weighted loss", "gpipe", 2, "2B5"), ("dropout", "gpipe", 2, "2B5")],
)
def test_what_a_shadow_had_run_ahead_counts_once_where_it_inherits_the_sum_of_it(
    feature: str, schedule: str, node: int, at: str
) -> None:
    """Statistics, losses and their weights ride along with a sum: its own forwards must not be added to them."""
    described = replace(job_of((feature,), True, 8), steps=4)
    ways: dict[str, Any] = {"pipelines": 1, "stages": 3, "schedule": schedule, "strategy": "shadow"}
    faults = Faults().warn(node, seconds=0.1, at=at, step=2)
    run = survived(faults, described, **ways)
    assert [source for _, _, source in paid(run)] == ["notice"]
    assert run.losses == truth(described).losses


def test_whoever_inherits_may_be_lost_in_its_turn(pace_s: float) -> None:
    faults = Faults().warn(0, seconds=0.3 * pace_s, step=STEP, nth=8).kill(2, at="adopt", nth=2)
    run = survived(faults, pipelines=3)
    assert sorted(node for lost, _, _ in paid(run) for node in lost) == [0, 2]


def test_notices_shorter_than_a_step_may_overlap(pace_s: float) -> None:
    faults = Faults().warn((0, 3), seconds=0.4 * pace_s, step=STEP, nth=8)
    run = survived(faults)
    assert sorted(node for lost, _, _ in paid(run) for node in lost) == [0, 3]
    assert {source for _, _, source in paid(run)} == {"notice"}
