"""Training during an outage of the store: steps are committed, and the next leader knows them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import run_with_faults
from tests.tiny_jobs import job

from culm import Job
from culm.cluster.leader.output.store_writer import StoreWriter
from culm.cluster.leader.recovery_metrics import RecoveryMetrics
from culm.cluster.leader.recovery_record import RecoveryRecord
from culm.cluster.store.store import MemoryStore, StoreClient
from culm.runtime.clock import RealClock
from culm.testing import Faults, SimulatedRun
from culm.testing.virtual_time import run_virtual

TWELVE = job(steps=12, exact=True)
AWAY_S = 100.0


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def through(faults: Faults, out: Path, described: Job, **request: Any) -> SimulatedRun:
    asked = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(out), **request}
    run = run_with_faults(described, faults, cost=lambda *_: 0.01, **asked)
    assert [row["step"] for row in lines(out / "steps.jsonl")] == list(range(described.steps))
    return run


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_training_continues_while_the_store_is_unreachable(strategy: str, tmp_path: Path) -> None:
    away = Faults().outage(1, seconds=AWAY_S, step=2, nth=2)
    through(away, tmp_path, TWELVE, strategy=strategy)
    assert lines(tmp_path / "steps.jsonl")[-1]["t"] < AWAY_S
    kinds = [event["kind"] for event in lines(tmp_path / "events.jsonl")]
    assert kinds.count("store_away") == 1
    assert "lost" not in kinds
    assert "stalled" not in kinds


def test_nodes_join_and_leave_again_when_the_store_is_back(tmp_path: Path) -> None:
    faults = Faults().outage(1, seconds=2.0, step=2, nth=2).kill(3, step=4)
    through(faults, tmp_path, job(steps=60, exact=True))
    events = lines(tmp_path / "events.jsonl")
    kinds = [event["kind"] for event in events if event["kind"] in ("store_away", "store_back", "lost", "recovered")]
    assert kinds == ["store_away", "lost", "recovered", "store_back"], "the commit after that finds it in reach"


@pytest.mark.parametrize("killed", [(0,), (0, 1)], ids=["the leader", "the leader and another"])
@pytest.mark.parametrize("at", ["0F1", "0W1", "commit"])
def test_a_leader_after_an_outage_learns_from_workers_what_was_committed(
    at: str, killed: tuple[int, ...], tmp_path: Path
) -> None:
    faults = Faults().outage(1, seconds=AWAY_S, step=2, nth=2).kill(killed, at=at, step=8)
    run = through(faults, tmp_path, TWELVE, schedule="zb")
    assert run.summary["preemptions"] == len(killed)
    assert run.summary["samples_duplicated"] == 0
    epochs = [event for event in lines(tmp_path / "events.jsonl") if event["kind"] == "epoch"]
    assert min(epochs[1]["open_steps"] or [epochs[1]["step"]]) >= 7, "what was committed in the outage stays so"


@pytest.mark.parametrize("at", ["inventory", "adopt"])
def test_steps_committed_in_an_outage_survive_the_loss_of_the_next_leader_too(at: str, tmp_path: Path) -> None:
    faults = Faults().outage(1, seconds=AWAY_S, step=2, nth=2).kill(0, at="0F1", step=8)
    faults = faults.kill(1, at=at, nth={"inventory": 1, "adopt": 2}[at])
    run = through(faults, tmp_path, TWELVE, schedule="zb")
    assert run.summary["preemptions"] == 2
    assert run.summary["samples_duplicated"] == 0


def test_unrecovered_nodes_are_those_without_a_recovery_record() -> None:
    """A snapshot from the workers is newer than the store's, but does not know the losses since."""
    metrics = RecoveryMetrics(RealClock())
    metrics.restore((), unrecovered_nodes=(1,))
    metrics.unrecovered_nodes.add(0)
    metrics.restore((RecoveryRecord(3, (1,), 0.0, 0.0, 0.0, 0.0, 0, "peers"),), unrecovered_nodes=())
    assert metrics.unrecovered_nodes == {0}


def test_of_several_pending_snapshots_only_the_last_is_written_but_every_step() -> None:
    async def main() -> None:
        memory = MemoryStore()
        changes = memory.subscribe("")
        minutes = StoreWriter(memory.client("leader"), 1.0)
        for step in b"012":
            minutes.enqueue("progress", b"r%c" % step)
            minutes.enqueue("step", b"s%c" % step, keep_every_value=True)
        assert minutes.has_pending_writes
        await minutes.wait_until_written()
        assert [changes.get_nowait() for _ in range(changes.qsize())] == [
            ("step", b"s0"),
            ("step", b"s1"),
            ("progress", b"r2"),
            ("step", b"s2"),
        ]

    run_virtual(main())


def test_writes_of_a_long_outage_are_given_up_at_once() -> None:
    """A leader that leaves during an outage must not fail: its node keeps its state."""

    class Unreachable(StoreClient):
        async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        writer = StoreWriter(Unreachable(MemoryStore(), "leader"), 1.0)
        snapshots = [bytes(100) for _ in range(5000)]
        for snapshot in snapshots:
            writer.enqueue("progress", snapshot)
            writer.enqueue("step", b"s", keep_every_value=True)
            await asyncio.sleep(0)
        assert not await writer.wait_with_timeout()
        assert sum(sys.getrefcount(snapshot) > 3 for snapshot in snapshots) <= 2, "only the first and the last are kept"
        await writer.close()

    run_virtual(main())
