"""The leader: a failure of a background task ends the run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.gnn.simulated_run import small_graph, small_model

from culm.cluster.store.store import MemoryStore
from culm.errors import RunError
from culm.gnn.leader import gnn_leader
from culm.gnn.leader.gnn_leader import GnnLeader
from culm.gnn.server.store_records import GnnRunConfig
from culm.gnn.server.weight_stash import Adam


class NullLauncher:
    """A launcher whose servers never start."""

    name = "nobody"

    async def launch(self, ticket: Any, count: int) -> None:
        pass

    async def close(self) -> None:
        pass


def small_config() -> GnnRunConfig:
    return GnnRunConfig(
        run="r", model=small_model(small_graph()), seed=0, adam=Adam(), mode="sync", staleness=0, lookahead=True,
        epochs=2, evaluate_every=1, checkpoint_every=1, servers=1, parameter_servers=1, train_vertices=1,
        parts_folder="", checkpoints="", threads=1,
    )  # fmt: skip


def test_repeatedly_broken_connections_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gnn_leader, "_BROKEN_LINK_GRACE_S", 0.0)
    monkeypatch.setattr(gnn_leader, "_MAX_CONSECUTIVE_SERVER_LOSSES", 3)

    async def scenario() -> None:
        store = MemoryStore().client("leader")
        run_store: Any = SimpleNamespace(store=store, ticket=None, kind="here", evict=None)
        worker_pool: Any = SimpleNamespace(announce_servers=lambda _: None)
        leader = GnnLeader(
            small_config(), run_store, worker_pool, NullLauncher(), patience=0, latency_s=0.0,
            on_event=lambda **_: None, on_epoch=lambda _: None, on_evaluation=lambda _: None,
        )  # fmt: skip
        leader_task = asyncio.create_task(leader.run())
        for number in range(5):
            await store.put(f"broken/{number}", b"0")
            await asyncio.sleep(0.01)
        await asyncio.wait_for(leader_task, 30)

    with pytest.raises(RunError, match="3 servers were lost without a completed epoch"):
        asyncio.run(scenario())
