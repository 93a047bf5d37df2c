"""Stored run: what the leader keeps in the store for the next one, and what it finds there of the previous one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.cluster.leader.events import CommitStep, PublishEpoch, Started
from culm.cluster.leader.leader_snapshot import decode_snapshot
from culm.cluster.run_setup import encode
from culm.runtime import messages
from culm.runtime.epoch import Epoch

if TYPE_CHECKING:
    from culm.cluster.leader.output.store_writer import StoreWriter
    from culm.cluster.store.store import Store
    from culm.runtime.clock import Clock


class StoredRun:
    """Reads the epoch and the snapshot of a previous leader once, then writes epochs and commits."""

    def __init__(self, store: Store, writer: StoreWriter, clock: Clock) -> None:
        self._store, self._writer, self._clock = store, writer, clock
        self._published_epoch: bytes | None = None
        """The encoded epoch in the store."""
        self._announcement: bytes | None = None
        """The announcement in the store; of an earlier epoch if a leader was lost before it could announce one."""

    async def load(self, *, previous_leader: int | None, sessions_expired: bool, reads_hook_result: bool) -> Started:
        """Read what a previous leader has left in the store."""
        epoch, record = await self._store.get("epoch"), await self._writer.read_snapshot()
        self._published_epoch, self._announcement = epoch, await self._store.get("announced")
        nodes: dict[int, bytes] = {}
        killed: dict[int, float] = {}
        hook_result = await self._store.get("hook") if reads_hook_result else None
        if epoch is not None:
            found = messages.decode(epoch)
            assert isinstance(found, Epoch)
            for node in dict.fromkeys(member.node for member in found.present_members):
                known = await self._store.get(f"nodes/{node}")
                if known is not None:
                    nodes[node] = known
                killed |= killed_at(self._clock, node)
        absent = await self._absent_nodes(record)
        return Started(
            epoch,
            record,
            nodes,
            hook_result,
            previous_leader,
            killed,
            absent_nodes=absent,
            sessions_expired=sessions_expired,
        )

    async def _absent_nodes(self, record: bytes | None) -> tuple[int, ...]:
        """The nodes that the previous leader knew as rented and that are not in the store."""
        spending = None if record is None else decode_snapshot(record).spending
        known = () if spending is None else spending.names
        return tuple([node for node in known if await self._store.get(f"nodes/{node}") is None])

    async def publish_epoch(self, order: PublishEpoch) -> bool:
        """Write an epoch to the store, then announce it. Both fail for a leader that was replaced."""
        await self._writer.wait_until_written()  # snapshots that workers keep then belong to this epoch
        if not await self._store.swap("epoch", self._published_epoch, order.body):
            return False
        self._published_epoch = order.body
        inline = b"" if order.is_large else order.body
        announcement = encode(messages.EpochAnnouncement(order.number, order.digest, inline))
        if not await self._store.swap("announced", self._announcement, announcement):
            return False
        self._announcement = announcement
        return True

    async def commit_step(self, commit: CommitStep) -> bool:
        """Write a commit to the store. Returns whether it is there."""
        lags = commit.store_unreachable and self._writer.has_pending_writes
        if commit.record is not None:
            self._writer.enqueue_snapshot(commit.record)
        if commit.step is not None:
            self._writer.enqueue("step", commit.step, keep_every_value=True)
        if commit.wait:
            await self._writer.wait_until_written()
            return True
        return not lags and await self._writer.wait_with_timeout()


def killed_at(clock: Clock, node: int) -> dict[int, float]:
    """By node: when it was killed by an injected fault, if that is known."""
    at = clock.killed_at(node)
    return {} if at is None else {node: at}
