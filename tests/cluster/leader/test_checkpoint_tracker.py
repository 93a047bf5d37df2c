"""Checkpoints during epoch changes: an open checkpoint survives the end of its epoch."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.cached_runs import run_with_faults

from culm import Job
from culm.checkpoint import CheckpointCatalog, Storage
from culm.cluster.leader.checkpoints.checkpoint_committer import CheckpointCommitter
from culm.cluster.leader.checkpoints.checkpoint_tracker import CheckpointTracker
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.runtime.clock import RealClock
from culm.testing import Faults
from culm.testing.chaos import make_job

STEPS, EVERY = 12, 5


@functools.cache
def job() -> Job:
    return replace(make_job((), True, 4), steps=STEPS)


def checkpoints(faults: Faults, folder: Path, **request: Any) -> list[int]:
    """The checkpoints of a run whose result equals that of one process."""
    asked = {"pipelines": 2, "stages": 2, "strategy": "reroute", "checkpoint_every": EVERY, "out": str(folder)}
    complete: list[int] = run_with_faults(job(), faults, **{**asked, **request}).summary["checkpoints"]
    return complete


def test_an_open_checkpoint_is_completed_after_a_node_has_joined(tmp_path: Path) -> None:
    back = Faults().kill(1, step=1, nth=3).join(0, step=EVERY - 1)
    assert EVERY in checkpoints(back + Faults().slow_disk(2, seconds=0.6), tmp_path)


def test_a_checkpoint_interrupted_by_a_loss_is_written_after_the_next_step(tmp_path: Path) -> None:
    found = checkpoints(Faults().slow_disk(2, seconds=0.4).kill(2, step=EVERY, nth=3), tmp_path)
    assert EVERY not in found
    assert found[0] in (EVERY + 1, EVERY + 2)


def test_a_checkpoint_still_being_written_is_not_requested_again(tmp_path: Path) -> None:
    busy = Faults().slow_disk(3, seconds=3.0).slow_disk(2, seconds=3.0)
    assert checkpoints(busy.kill(2, step=EVERY, nth=3), tmp_path)[0] == 2 * EVERY


def test_shards_that_arrive_too_late_are_removed_at_the_end(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(Storage(tmp_path))
    part = catalog.write_shard(EVERY, catalog.shard_name(EVERY, 0), {"0.weight": torch.ones(2)})
    committed = catalog.commit(EVERY, [part], {}, {}, created=0.0)
    catalog.write_shard(EVERY, catalog.shard_name(EVERY, 1), {"0.weight": torch.ones(2)})
    setup = prepare_run(job(), RunConfig(pipelines=1, stages=2))
    saves = CheckpointTracker(setup)
    saves.completed_steps = [EVERY]
    asyncio.run(CheckpointCommitter(saves, setup, RealClock()).prune_leftovers(str(tmp_path)))
    assert {path.name for path in tmp_path.glob("*/*")} == {*committed.files, "manifest.json"}
    assert catalog.newest().manifest == committed
