"""Checkpoints as one worker sees them: its share of the state, written aside; and layers taken out of one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from culm.checkpoint import Catalog, Storage
from culm.errors import CulmError
from culm.runtime.epoch import ShardReport, encode
from culm.runtime.reports import failure
from culm.runtime.state import Snapshot

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch
    from culm.runtime.executor import Executor
    from culm.runtime.pulse import Pulse
    from culm.runtime.state import State
    from culm.transport.base import Transport


class Saving:
    """The writes of a worker, one at a time: a disk that is slower than the interval holds training up rather than
    memory. A write outlives the epoch that it was begun in."""

    def __init__(self, node: int, transport: Transport, clock: Clock, pulse: Pulse) -> None:
        self.node, self.transport, self.clock, self.pulse = node, transport, clock, pulse
        self._writing: asyncio.Task[None] | None = None
        self._newest: tuple[int, int] | None = None
        """(epoch, completed steps) of the last write that was begun."""

    async def save(self, executor: Executor, done: int) -> None:
        """Copy this worker's share of the state and write it aside; training goes on at once."""
        epoch = executor.epoch
        if epoch.storage is None or self._newest == (epoch.number, done):
            return
        await self.saved()
        self._newest = epoch.number, done
        snapshot = _share(executor).copy()
        self._writing = asyncio.create_task(self._write(epoch, done, snapshot, executor.slot))

    def idle(self, epoch: int) -> bool:
        """Whether no write is under way, and none was begun in this epoch."""
        begun = self._newest is not None and self._newest[0] == epoch
        return not begun and (self._writing is None or self._writing.done())

    async def saved(self) -> None:
        """Until the write that is under way has ended."""
        if self._writing is not None:
            with self.pulse.slowly():
                await asyncio.shield(self._writing)  # a halt ends this wait, not the write
            self._writing = None

    async def close(self) -> None:
        """The worker ends: what is not written yet never will be."""
        if self._writing is not None:
            self._writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._writing

    async def _write(self, epoch: Epoch, done: int, snapshot: Snapshot, slot: int) -> None:
        assert epoch.storage is not None
        catalog = Catalog(Storage(epoch.storage))
        name = catalog.shard_name(done, slot)
        try:
            receipt = await self.clock.aside(catalog.write_shard, done, name, snapshot.tensors)
        except CulmError as error:
            self.transport.post(epoch.leader, encode(failure(self.node, error)))
            return
        report = ShardReport(
            self.node,
            epoch.number,
            done,
            receipt.name,
            receipt.sha256,
            receipt.bytes,
            receipt.tensors,
            snapshot.scalars,
        )
        self.transport.post(epoch.leader, encode(report))


def _share(executor: Executor) -> Snapshot:
    """What this worker saves: each layer is saved by one of those that run it, in turn."""
    found = Snapshot()
    for g, segment in executor.segments.items():
        runners = executor.runners(g)
        turn = runners.index(executor.slot)
        mine = [layer.index for layer in segment.layers if layer.index % len(runners) == turn]
        found.update(executor.desk.holdings[g % executor.plan.stages].state.snapshot(mine))
    return found


def load_checkpoint(state: State, root: str, step: int) -> None:
    """Take the layers held here out of a checkpoint, each byte checked where it is read."""
    catalog = Catalog(Storage(root))
    manifest = catalog.check(step, verify="sizes")
    reader = catalog.open(manifest, verify=True)
    wanted = state.names()
    tensors = reader.tensors(name for name in reader.names() if _belongs(name, wanted))
    state.restore_named(tensors, {n: v for n, v in manifest.scalars.items() if _belongs(n, wanted)})


def _belongs(name: str, wanted: set[str]) -> bool:
    """'0.weight' and 'optimizer.0.weight.exp_avg' belong to a holder of '0.weight'."""
    if name in wanted:
        return True
    return name.startswith("optimizer.") and name.removeprefix("optimizer.").rpartition(".")[0] in wanted
