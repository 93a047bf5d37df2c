"""Checkpoints in the midst of change: what is being written is not lost with the epoch that it was begun in."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tests.known import hurt

from culm import Job
from culm.checkpoint import Catalog, Storage
from culm.cluster.prepare import Request, prepare
from culm.cluster.saves import Saves
from culm.runtime.clock import RealClock
from culm.testing import Faults
from culm.testing.chaos import job_of

STEPS, EVERY = 12, 5


@functools.cache
def job() -> Job:
    return replace(job_of((), True, 4), steps=STEPS)


def checkpoints(faults: Faults, folder: Path, **request: Any) -> list[int]:
    """Of a run that learned what one process does."""
    asked = {"pipelines": 2, "stages": 2, "strategy": "reroute", "checkpoint_every": EVERY, "out": str(folder)}
    complete: list[int] = hurt(job(), faults, **{**asked, **request}).summary["checkpoints"]
    return complete


def test_a_checkpoint_on_its_way_is_completed_though_a_newcomer_has_come_in(tmp_path: Path) -> None:
    back = Faults().kill(1, step=1, nth=3).join(0, step=EVERY - 1)
    assert EVERY in checkpoints(back + Faults().slow_disk(2, seconds=0.6), tmp_path)


def test_one_that_a_loss_has_spoilt_is_written_again_after_the_next_step(tmp_path: Path) -> None:
    found = checkpoints(Faults().slow_disk(2, seconds=0.4).kill(2, step=EVERY, nth=3), tmp_path)
    assert EVERY not in found
    assert found[0] in (EVERY + 1, EVERY + 2)


def test_nobody_waits_for_a_busy_disk_to_write_it_again(tmp_path: Path) -> None:
    busy = Faults().slow_disk(3, seconds=3.0).slow_disk(2, seconds=3.0)
    assert checkpoints(busy.kill(2, step=EVERY, nth=3), tmp_path)[0] == 2 * EVERY


def test_a_part_that_came_after_others_had_completed_its_checkpoint_does_not_outlive_the_run(tmp_path: Path) -> None:
    catalog = Catalog(Storage(tmp_path))
    part = catalog.write_shard(EVERY, catalog.shard_name(EVERY, 0), {"0.weight": torch.ones(2)})
    committed = catalog.commit(EVERY, [part], {}, {}, created=0.0)
    catalog.write_shard(EVERY, catalog.shard_name(EVERY, 1), {"0.weight": torch.ones(2)})
    saves = Saves(prepare(job(), Request(pipelines=1, stages=2)), RealClock())
    saves.complete = [EVERY]
    asyncio.run(saves.tidy(str(tmp_path)))
    assert {path.name for path in tmp_path.glob("*/*")} == {*committed.files, "manifest.json"}
    assert catalog.newest().manifest == committed
