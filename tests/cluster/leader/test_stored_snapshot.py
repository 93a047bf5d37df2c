"""The leader's snapshot in the store: complete at every moment, and its size does not grow with what has happened."""

from __future__ import annotations

import asyncio

import msgspec
from tests.tiny_jobs import job

from culm.cluster.leader.leader_snapshot import LeaderProgress, SnapshotHistory, decode_snapshot
from culm.cluster.leader.recovery_record import RecoveryRecord
from culm.cluster.leader.stored_snapshot import EncodedSnapshot, StoredSnapshot
from culm.cluster.store.store import MemoryStore, StoreChange
from culm.testing import Faults, simulate
from culm.testing.virtual_time import run_virtual

ENCODE = msgspec.msgpack.encode


def snapshot(step: int, losses: int = 0) -> EncodedSnapshot:
    recoveries = tuple(RecoveryRecord(node, (node,), 0.0, 0.0, 0.0, 0.0, 0, "peers") for node in range(losses))
    progress = LeaderProgress(
        started_at=0.0,
        first_step_at=None,
        next_step=step,
        steps=step,
        samples=step,
        lost_samples=0,
        duplicated_samples=0,
        skipped_steps=0,
        last_step=None,
        at_risk_s=0.0,
    )
    return EncodedSnapshot(ENCODE(progress), ENCODE(SnapshotHistory(recoveries=recoveries)))


def drain(changes: asyncio.Queue[StoreChange]) -> list[StoreChange]:
    """The changes so far; at first these are all keys that there are."""
    return [changes.get_nowait() for _ in range(changes.qsize())]


def test_after_each_single_write_the_store_has_a_whole_snapshot() -> None:
    """A leader may be lost between any two writes."""

    async def main() -> None:
        memory = MemoryStore()
        changes = memory.subscribe("")
        writer = StoredSnapshot(memory.client("leader"))
        wanted = [snapshot(step, losses=step // 2) for step in range(7)]
        for each in wanted:
            await writer.write(each)
        copy, found = MemoryStore(), []
        for key, value in drain(changes):
            copy.write(key, value)
            read = await StoredSnapshot(copy.client("next leader")).read()
            found.append(None if read is None else decode_snapshot(read))
        assert found[0] is None
        assert [each for index, each in enumerate(found[1:], 1) if each != found[index - 1]] == [
            decode_snapshot(each.join()) for each in wanted
        ]

    run_virtual(main())


def test_the_next_leader_continues_in_the_other_slot() -> None:
    async def main() -> None:
        memory = MemoryStore()
        client = memory.client("leader")
        await StoredSnapshot(client).write(snapshot(0, losses=1))
        next_leader = StoredSnapshot(client)
        assert await next_leader.read() == snapshot(0, losses=1).join()
        seen = len(drain(changes := memory.subscribe("")))
        await next_leader.write(snapshot(1, losses=1))
        await next_leader.write(snapshot(2, losses=2))
        assert seen == 2
        assert [key for key, _ in drain(changes)] == ["record", "history/1", "record"]

    run_virtual(main())


def test_an_empty_store_has_no_snapshot() -> None:
    assert run_virtual(StoredSnapshot(MemoryStore().client("leader")).read()) is None


def test_a_commit_after_many_losses_writes_as_little_as_after_none() -> None:
    async def main() -> None:
        sizes = []
        for losses in (0, 1000):
            memory = MemoryStore()
            writer = StoredSnapshot(memory.client("leader"))
            await writer.write(snapshot(1, losses))
            drain(changes := memory.subscribe(""))
            await writer.write(snapshot(2, losses))
            sizes.append([len(value or b"") for _, value in drain(changes)])
        few, many = sizes
        assert len(few) == len(many) == 1
        assert many[0] < 2 * few[0]

    run_virtual(main())


def test_every_leader_of_a_run_finds_the_history_of_those_before() -> None:
    faults = Faults().kill(0, at="commit", step=2).kill(1, at="commit", step=4)
    run = simulate(job(steps=8), pipelines=3, stages=2, strategy="reroute", faults=faults)
    assert sorted(node for each in run.summary["recoveries"] for node in each["lost"]) == [0, 1]
    assert run.summary["preemptions"] == 2
