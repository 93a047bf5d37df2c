"""Checkpoints of a run as its leader sees them: the ones that are being written, and the one to go back to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from culm.checkpoint import Catalog, ShardReceipt, Storage
from culm.errors import CheckpointError

if TYPE_CHECKING:
    from culm.cluster.setup import Setup
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch, ShardReport

_EPOCHS = 8
"""That have ended, of which parts may still come."""


@dataclass(frozen=True)
class _Begun:
    """A checkpoint that is being written: who has a part in it, and the parts that lie on storage."""

    savers: frozenset[int]
    parts: dict[int, ShardReport] = field(default_factory=dict)

    @property
    def missing(self) -> frozenset[int]:
        return self.savers - self.parts.keys()


class Saves:
    """Checkpoints by epoch and step. When all parts of one lie on storage and its last step is committed, one atomic
    write makes them a checkpoint: whoever goes back to it finds all that it holds in the ledger. Its epoch may have
    ended by then, as long as nobody has gone whose part is missing."""

    def __init__(self, setup: Setup, clock: Clock) -> None:
        self.complete: list[int] = []
        self._begun: dict[tuple[int, int], _Begun] = {}
        self._savers: dict[int, frozenset[int]] = {}
        """By epoch, the nodes that have a part of its checkpoints; of those in which all of them are still there."""
        self._epoch = 0
        self._setup, self._clock = setup, clock

    def __len__(self) -> int:
        """How many are being written in this epoch."""
        return sum(epoch == self._epoch for epoch, _ in self._begun)

    def begin(self, epoch: Epoch, savers: Collection[int], gone: Collection[int]) -> None:
        """A new epoch, in which those have a part. Of what was begun before some may never come."""
        self.complete = [step for step in self.complete if step <= epoch.start]
        if epoch.reset:
            self._begun, self._savers = {}, {}
        self._begun = {key: begun for key, begun in self._begun.items() if not begun.missing.intersection(gone)}
        whole = [(number, own) for number, own in self._savers.items() if not own.intersection(gone)]
        self._savers = dict(whole[-_EPOCHS:])
        self._savers[epoch.number] = frozenset(savers)
        self._epoch = epoch.number

    def owed(self, epoch: Epoch, gone: Collection[int]) -> bool:
        """Whether the checkpoint that was due last before an epoch is neither complete nor on its way."""
        if not epoch.checkpoint_every or epoch.reset:
            return False
        due = epoch.start // epoch.checkpoint_every * epoch.checkpoint_every
        coming = [step for (_, step), begun in self._begun.items() if not begun.missing.intersection(gone)]
        return due > max(self.complete, default=self._setup.resume or 0) and due not in coming

    def note(self, report: ShardReport) -> None:
        """A part lies on storage."""
        key = report.epoch, report.step
        if key not in self._begun:
            if report.epoch not in self._savers or report.step <= max(self.complete, default=-1):
                return  # what is missing of it will never come, or a later one is there
            self._begun[key] = _Begun(self._savers[report.epoch])
        self._begun[key].parts[report.node] = report

    async def make(self, committed: int, folder: str) -> tuple[int, int] | None:
        """Make the newest checkpoint that has all its parts, and all its steps committed: its step, and its bytes."""
        whole = [key for key, begun in self._begun.items() if not begun.missing and key[1] <= committed]
        if not whole:
            return None
        newest = max(whole, key=lambda key: key[1])
        step, parts = newest[1], self._begun[newest].parts.values()
        catalog = Catalog(Storage(folder))
        receipts = [ShardReceipt(r.name, r.sha256, r.size, r.tensors) for r in parts]
        scalars = {name: value for r in parts for name, value in r.scalars.items()}
        await self._clock.aside(catalog.commit, step, receipts, scalars, self._setup.facts, time.time())
        await self._clock.aside(catalog.prune, self._setup.keep_last, verify="sizes")
        self._begun = {key: begun for key, begun in self._begun.items() if key[1] > step}
        self.complete.append(step)
        return step, sum(r.size for r in parts)

    async def tidy(self, folder: str) -> None:
        """Nobody writes any more. Parts that came too late for their checkpoint go, if they can."""
        if self.complete:
            with contextlib.suppress(CheckpointError):
                await self._clock.aside(Catalog(Storage(folder)).prune, self._setup.keep_last, verify="sizes")

    async def newest(self, folder: str | None) -> tuple[int, str] | None:
        """The newest good checkpoint, of this run or the one that it went on from: its step, and where it lies."""
        for where in (folder, self._setup.resume_from):
            if where is not None:
                with contextlib.suppress(CheckpointError):
                    found = await self._clock.aside(Catalog(Storage(where)).newest)
                    return found.manifest.step, where
        return None
