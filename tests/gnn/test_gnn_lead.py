"""Whoever leads: what goes wrong beside it ends the run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.gnn.house import small_graph, small_model

from culm.cluster.store import MemoryStore
from culm.errors import RunError
from culm.gnn import lead
from culm.gnn.lead import Leader
from culm.gnn.setup import Setup
from culm.gnn.shelf import Adam


class Nobody:
    """A launcher whose servers never come."""

    name = "nobody"

    async def launch(self, ticket: Any, count: int) -> None:
        pass

    async def close(self) -> None:
        pass


def setup() -> Setup:
    return Setup(
        run="r", model=small_model(small_graph()), seed=0, adam=Adam(), mode="sync", staleness=0, lookahead=True,
        epochs=2, evaluate_every=1, checkpoint_every=1, servers=1, parameter_servers=1, total=1, parts="",
        checkpoints="", threads=1,
    )  # fmt: skip


def test_connections_that_break_again_and_again_end_the_run_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "_SUSPECT_S", 0.0)
    monkeypatch.setattr(lead, "_MOST_LOSSES", 3)

    async def scenario() -> None:
        store = MemoryStore().client("leader")
        meeting: Any = SimpleNamespace(store=store, ticket=None, kind="here", evict=None)
        desk: Any = SimpleNamespace(tell=lambda _: None)
        leader = Leader(
            setup(), meeting, desk, Nobody(), patience=0, latency_s=0.0,
            told=lambda **_: None, epoch=lambda _: None, evaluated=lambda _: None,
        )  # fmt: skip
        leading = asyncio.create_task(leader.run())
        for number in range(5):
            await store.put(f"broken/{number}", b"0")
            await asyncio.sleep(0.01)
        await asyncio.wait_for(leading, 30)

    with pytest.raises(RunError, match="3 servers were lost and not an epoch was done"):
        asyncio.run(scenario())
