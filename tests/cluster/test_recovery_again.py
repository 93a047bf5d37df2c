"""Losses during the recovery from a loss: worker roles change while steps are open, and nothing is lost or added twice.

Each schedule of faults was found by a random search. It is run as found, with the seed that times the actions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cached_runs import run_with_faults
from tests.tiny_jobs import job, linear

from culm.job import Job
from culm.runtime.compute.addition_count import Additions
from culm.runtime.compute.segment import MicroBatchResult
from culm.runtime.microbatch_stats import MicroBatchStats
from culm.runtime.worker_state import StageReplica
from culm.testing import Faults
from culm.testing.survival_check import random_action_cost


def described(layers: int, micro_batches: int) -> Job:
    return job(layers=[linear] * layers, global_batch=2 * micro_batches, steps=4, exact=True)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_worker_that_reruns_a_stage_does_not_add_its_gradients_twice(seed: int) -> None:
    """Node 7 runs stage 0 when step 3 begins. After the loss of node 6 the joining node 8 runs stage 0 and recomputes
    the contribution of node 7. After the loss of node 4 both run it."""
    faults = (
        Faults()
        .kill((2, 3), at="adopt")
        .join(7, step=0, nth=11)
        .kill(0, at="commit", step=0)
        .kill(6, step=3, nth=7)
        .kill(4, step=3, nth=10)
    )
    shape: dict[str, Any] = {"pipelines": 2, "stages": 4, "schedule": "zb", "strategy": "shadow-lazy"}
    run_with_faults(described(12, 8), faults, cost=random_action_cost(seed), reconfigure="never", **shape)


def test_a_restarted_sum_counts_the_loss_of_the_local_forward() -> None:
    """This worker has run a forward ahead. Then it receives the sum of another worker that includes that micro-batch,
    and the sum is discarded: the backward continues from the local tape, and the loss of the local forward counts."""
    wanted = described(1, 2)
    segment = StageReplica(wanted, 0, {0: range(1)}, torch.device("cpu"), 0).segments[0]
    mine, theirs = MicroBatchStats(segment, 2), MicroBatchStats(segment, 2)
    for book in (mine, theirs):
        book.record_forward(1, MicroBatchResult(loss=torch.tensor(3.0), weight=None, statistics={}))
    theirs.count_backward(1, Additions(1, 1))
    mine.add_metadata(theirs.metadata())
    assert mine.metadata().tolist() == theirs.metadata().tolist()
    mine.restart()
    assert mine.counts == [0, 0]
    assert not mine.metadata().any()
    mine.count_backward(1, Additions(1, 1))
    assert mine.metadata().tolist() == theirs.metadata().tolist()


@pytest.mark.parametrize("seed", [0, 7])
def test_a_leaving_node_does_not_wait_for_later_actions_of_its_list(seed: int) -> None:
    """Node 3 computes the input gradients of node 2 from forwards that were lost with node 0: these forwards come first
    in its list, whether or not they have a weight gradient to add."""
    faults = (
        Faults()
        .kill(0, at="0R", step=0)
        .warn(2, at="adopt", nth=3, seconds=0.279)
        .warn(1, at="adopt", seconds=0.363)
        .slow_link(2, 3, latency=0.0399)
    )
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "schedule": "1f1b", "strategy": "shadow"}
    run_with_faults(described(12, 8), faults, cost=random_action_cost(seed), reconfigure="never", **shape)


TWO_LOST = Faults().kill(5, step=1).kill(4, at="adopt", nth=2)
"""2 x 3: stages 1 and 2 have one runner left. One of the two runners of stage 0 is to move to stage 2."""
SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 3, "schedule": "1f1b", "strategy": "reroute"}


@pytest.mark.parametrize("at", ["commit", "0S+", "0R"])
def test_a_worker_does_not_move_if_its_stage_would_have_one_holder(at: str) -> None:
    """The copy that node 3 is to move to does not count before step 1 is committed. Node 0 vanishes before that."""
    faults = TWO_LOST + Faults().kill(0, at=at, step=1)
    run_with_faults(described(6, 6), faults, cost=random_action_cost(163), reconfigure="never", **SHAPE)


@pytest.mark.parametrize("node", range(4))
def test_after_a_move_any_single_node_may_be_lost(node: int, tmp_path: Path) -> None:
    faults = TWO_LOST + Faults().kill(node, step=3)
    ways: dict[str, Any] = {**SHAPE, "out": str(tmp_path), "reconfigure": "never"}
    run_with_faults(described(6, 6), faults, cost=random_action_cost(163), **ways)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    epochs = [number for number, event in enumerate(events) if event["kind"] == "epoch"]
    (moved,) = [number for number in epochs if "slot 3 runs stage 2 from now on" in events[number].get("why", "")]
    begun = max(number for number in epochs if number < moved)
    copied = {event["stage"] for event in events[begun:moved] if event["kind"] == "protected"}
    assert copied == {0, 1, 2}, "every stage has its copy before somebody moves"
