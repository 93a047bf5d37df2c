"""Checkpoints of a run as its leader sees them: the ones that are being written, and the one to go back to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from culm.checkpoint import Catalog, ShardReceipt, Storage
from culm.errors import CheckpointError

if TYPE_CHECKING:
    from culm.cluster.setup import Setup
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import ShardReport


class Saves:
    """By step, the parts that lie on storage; when all do, one atomic write makes them a checkpoint."""

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self.complete: list[int] = []
        self._parts: dict[int, dict[int, ShardReport]] = {}
        self._setup, self._clock = setup, clock

    def __len__(self) -> int:
        """How many are being written."""
        return len(self._parts)

    def begin(self, start: int) -> None:
        """A new epoch: what is missing of a checkpoint that was begun before will never come."""
        self._parts.clear()
        self.complete = [step for step in self.complete if step <= start]

    async def note(self, report: ShardReport, savers: Collection[int], folder: str) -> int | None:
        """A part lies on storage. If it was the last, the checkpoint is made and its size in bytes returned."""
        parts = self._parts.setdefault(report.step, {})
        parts[report.node] = report
        if not set(savers) <= parts.keys():
            return None
        catalog = Catalog(Storage(folder))
        receipts = [ShardReceipt(r.name, r.sha256, r.size, r.tensors) for r in parts.values()]
        scalars = {name: value for r in parts.values() for name, value in r.scalars.items()}
        await self._clock.aside(catalog.commit, report.step, receipts, scalars, self._setup.facts, time.time())
        await self._clock.aside(catalog.prune, self._setup.keep_last, verify="sizes")
        del self._parts[report.step]
        self.complete.append(report.step)
        return sum(r.size for r in parts.values())

    async def newest(self, folder: str | None) -> tuple[int, str] | None:
        """The newest good checkpoint, of this run or the one that it went on from: its step, and where it lies."""
        for where in (folder, self._setup.resume_from):
            if where is not None:
                with contextlib.suppress(CheckpointError):
                    found = await self._clock.aside(Catalog(Storage(where)).newest)
                    return found.manifest.step, where
        return None
