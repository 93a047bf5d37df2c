"""Checkpoints on one worker: write its share of the state in the background, and load layers from a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from culm.checkpoint import CheckpointCatalog, ShardReceipt, Storage
from culm.checkpoint.model_files import write_model_files
from culm.data.stream import POSITION_NAME, Stream
from culm.errors import CheckpointError
from culm.runtime.compute.snapshot import Scalar, Snapshot
from culm.runtime.messages import ShardReport, StorageReport, encode
from culm.runtime.storage_retry import MISSING_FOLDER_S, retry_storage, stall_timeout_s

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.compute.model_state import ModelState
    from culm.runtime.epoch import Epoch
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.heartbeat import HeartbeatSender
    from culm.transport.interface import Transport


_LOAD_RETRIES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Waits between attempts to read a checkpoint. Bounded: a damaged checkpoint raises the same error every time."""


class CheckpointWriter:
    """Writes the checkpoint shards of a worker in the background, one at a time. A write outlives the epoch that it was
    begun in.

    A storage that is slower than the checkpoint interval delays training, so that memory stays bounded. A storage that
    fails does not: the write is retried with backoff until the next checkpoint replaces it. The leader receives a
    StorageReport for every failed attempt, and one when the storage works again.
    """

    def __init__(self, worker: int, transport: Transport, clock: Clock, heartbeat: HeartbeatSender) -> None:
        self._worker, self._transport, self._clock, self._heartbeat = worker, transport, clock, heartbeat
        self._write_task: asyncio.Task[None] | None = None
        self._last_write: tuple[int, int] | None = None
        """(epoch, completed steps) of the last write that was begun."""
        self._write_failed = self._stalled = False
        """Whether an attempt of the write under way has failed, and whether the last one has not returned yet."""
        self._failing_since: float | None = None
        """The time of the first failure, reported to the leader, after which nothing has been written."""
        self._state_changed = asyncio.Event()
        """Set when an attempt has failed or a write has ended."""
        self._known_folder = ""
        """The folder of checkpoints in which the last write succeeded."""

    async def save(self, context: EpochContext, completed_steps: int, *, last: bool = False) -> None:
        """Copy this worker's share of the state and write it in the background.

        While an earlier write hangs, the checkpoint is skipped; the last one waits for it instead.
        """
        epoch = context.epoch
        if epoch.storage is None or self._last_write == (epoch.number, completed_steps):
            return
        await self._wait_for_write(or_failure=True)
        if self._stalled and last:
            await self._wait_for_write()
        if self._stalled:  # its thread still holds the former snapshot
            self._report_storage(epoch, completed_steps, "an earlier write has not returned", skipped=True)
            return
        if self._write_task is not None and not self._write_task.done() and self._last_write is not None:
            self._report_storage(epoch, self._last_write[1], "the next checkpoint is due", skipped=True)
        await self.close()
        self._last_write, self._write_failed = (epoch.number, completed_steps), False
        checksums = _replica_checksums(context, completed_steps)
        snapshot = _share_of_state(context, completed_steps).copy()
        write = self._write(epoch, completed_steps, snapshot, checksums, context.slot, context.job.files)
        self._write_task = asyncio.create_task(write)

    def is_idle(self, epoch: int) -> bool:
        """Whether no write is under way, and none was begun in this epoch."""
        begun = self._last_write is not None and self._last_write[0] == epoch
        return not begun and (self._write_task is None or self._write_task.done())

    async def wait_until_written(self) -> None:
        """Wait until the write that is under way has succeeded. The leader ends the run if that takes too long."""
        await self._wait_for_write()

    async def _wait_for_write(self, *, or_failure: bool = False) -> None:
        """Wait until the write has ended; with `or_failure` also until an attempt has failed."""
        task = self._write_task
        with self._heartbeat.keep_alive():
            while task is not None and not task.done() and not (or_failure and self._write_failed):
                self._state_changed.clear()
                await self._state_changed.wait()  # a halt ends this wait, not the write
        if task is not None and task.done() and not task.cancelled():
            task.result()

    async def close(self) -> None:
        """Give up the write that is under way."""
        task = self._write_task
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # raises if the caller is cancelled meanwhile
            self._write_task = None

    async def _write(
        self,
        epoch: Epoch,
        completed_steps: int,
        snapshot: Snapshot,
        checksums: dict[int, str],
        slot: int,
        files: Mapping[str, bytes],
    ) -> None:
        assert epoch.storage is not None
        storage = epoch.storage

        def write_shard() -> ShardReceipt:
            catalog = CheckpointCatalog(Storage(storage, existing=self._existing_folder(storage)))
            if slot == 0:
                write_model_files(catalog.storage, files)
            return catalog.write_shard(completed_steps, catalog.shard_name(completed_steps, slot), snapshot.tensors)

        def handle_failure(why: str, stalled: bool) -> None:
            if self._failing_since is None:
                self._failing_since = self._clock.now()
            self._write_failed, self._stalled = True, stalled
            self._state_changed.set()
            self._report_storage(epoch, completed_steps, why)

        try:
            size = sum(tensor.nbytes for tensor in snapshot.tensors.values())
            receipt = await retry_storage(self._clock, write_shard, handle_failure, stall_timeout_s(size))
        finally:
            self._state_changed.set()
        self._stalled, self._known_folder = False, storage
        if self._failing_since is not None:
            self._failing_since = None
            self._report_storage(epoch, completed_steps, "")
        report = ShardReport(
            self._worker,
            epoch.number,
            completed_steps,
            receipt.name,
            receipt.sha256,
            receipt.bytes,
            receipt.tensors,
            snapshot.scalars,
            checksums,
        )
        self._transport.send_message(epoch.leader, encode(report))

    def _existing_folder(self, storage: str) -> str | None:
        """The folder that a write does not create if it is gone, because it is expected back for a while: that of the
        checkpoints, if it was there before, or else the run folder."""
        if self._failing_since is not None and self._clock.now() - self._failing_since > MISSING_FOLDER_S:
            return None
        return storage if storage == self._known_folder else storage.rpartition("/")[0]

    def _report_storage(self, epoch: Epoch, completed_steps: int, why: str, *, skipped: bool = False) -> None:
        """Report to the leader that the storage fails, or with an empty reason that it works again."""
        report = StorageReport(self._worker, completed_steps, why, skipped)
        self._transport.send_message(epoch.leader, encode(report))


def _share_of_state(context: EpochContext, completed_steps: int) -> Snapshot:
    """What this worker saves. The runners of a segment share its layers: layer n is saved by runner n modulo their
    number."""
    share = Snapshot()
    for g, segment in context.segments.items():
        runners = context.plan.holders_of(g)
        rank = runners.index(context.slot)
        layers = [layer.index for layer in segment.layers if layer.index % len(runners) == rank]
        share.update(context.replica_of(g).state.saved_snapshot(layers))
        if 0 in layers:
            share.scalars.update(_stream_positions(context.job, completed_steps))
    return share


def _replica_checksums(context: EpochContext, completed_steps: int) -> dict[int, str]:
    """By layer: the checksum of weights and optimizer state here, for layers that another worker holds, too. All
    holders have made the same steps, so that their checksums are equal unless memory or arithmetic is faulty."""
    plan, epoch = context.plan, context.epoch
    shadowed = {shadow.stage for shadow in epoch.shadows}
    checksums: dict[int, str] = {}
    for replica in context.state.replicas.values():
        shared = replica.stage in shadowed or any(len(plan.holders_of(g)) > 1 for g in replica.segments)
        if shared and replica.version == completed_steps:
            checksums |= {index: replica.state.snapshot([index]).checksum() for index in replica.state.layers}
    return checksums


def _stream_positions(job: Job, completed_steps: int) -> dict[str, Scalar]:
    """Where the stream of a job is after some steps, as a scalar of the checkpoint; empty if it reads no stream."""
    stream = job.data
    if not isinstance(stream, Stream):
        return {}
    return {POSITION_NAME: stream.positions(completed_steps * job.global_batch)}


def load_checkpoint(state: ModelState, root: str, step: int) -> None:
    """Load the layers of `state` from a checkpoint. The bytes of each tensor are verified as they are read."""
    catalog = CheckpointCatalog(Storage(root))
    manifest = catalog.check(step, verify="sizes")
    reader = catalog.open(manifest, verify=True)
    held = state.tensor_names()
    stream = state.job.data
    if isinstance(stream, Stream) and POSITION_NAME in manifest.scalars:
        stream.add_positions(str(manifest.scalars[POSITION_NAME]))
    tensors = reader.tensors(name for name in reader.names() if _belongs_to_held(name, held))
    state.restore_named(tensors, {n: v for n, v in manifest.scalars.items() if _belongs_to_held(n, held)})


async def load_with_retries(state: ModelState, root: str, step: int, clock: Clock) -> None:
    """Load a checkpoint that the leader has found. Raises CheckpointError if that fails for about two minutes."""
    for delay in _LOAD_RETRIES_S:
        try:
            return await clock.run_in_thread(load_checkpoint, state, root, step)
        except CheckpointError:
            await clock.sleep(delay)
    return await clock.run_in_thread(load_checkpoint, state, root, step)


def _belongs_to_held(name: str, held: set[str]) -> bool:
    """Whether a stored name is a held tensor or its optimizer state: '0.weight' or 'optimizer.0.weight.exp_avg'."""
    if name in held:
        return True
    return name.startswith("optimizer.") and name.removeprefix("optimizer.").rpartition(".")[0] in held
