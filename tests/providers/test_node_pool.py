"""The nodes that a launcher provides, and what is said when none is left."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from culm.cluster.store.store import MemoryStore
from culm.providers.node_pool import NodePool
from culm.providers.provider import EXIT_REJOIN, NodeExit


def all_gone(out: Path | None) -> str:
    """What a run is ended with when its one node is killed."""
    said: list[str] = []

    async def gone() -> NodeExit:
        return NodeExit(0, -9)

    setup = SimpleNamespace(nodes=1, out=out)
    run: Any = SimpleNamespace(
        has_ended=False,
        owns_all_nodes=True,
        epoch="the first",
        has_joined=lambda _: True,
        fail=said.append,
        setup=setup,
    )
    provider: Any = SimpleNamespace(wait_for_exit=gone)
    nodes = NodePool(run, provider)
    nodes.running.add(0)
    asyncio.run(nodes.watch())
    (sentence,) = said
    return sentence


def test_when_no_node_is_left_the_error_says_how_to_continue(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    assert all_gone(tmp_path).endswith(f"4 steps are saved, continue with --resume {tmp_path}")


def test_when_no_node_is_left_and_nothing_was_saved_the_error_says_how_to_save(tmp_path: Path) -> None:
    for out in (tmp_path, None):
        assert "nothing of it was saved; --checkpoint-every N" in all_gone(out)


def test_a_node_that_rejoins_keeps_its_zone() -> None:
    ends = iter([NodeExit(1, EXIT_REJOIN), NodeExit(2, 0), NodeExit(0, 0)])
    started: list[tuple[int, str]] = []

    async def gone() -> NodeExit:
        return next(ends)

    setup = SimpleNamespace(nodes=2, out=None, survives_losses=True)
    run: Any = SimpleNamespace(
        has_ended=False,
        owns_all_nodes=False,
        epoch="the first",
        has_joined=lambda _: True,
        setup=setup,
        store=MemoryStore().client("l"),
    )
    provider: Any = SimpleNamespace(wait_for_exit=gone, start=lambda node, zone: started.append((node, zone)))

    async def main() -> None:
        nodes = NodePool(run, provider)
        await nodes.start(2, ["a", "b"])
        await nodes.watch()

    asyncio.run(main())
    assert started == [(0, "a"), (1, "b"), (2, "b")]
