"""Two nodes that everybody else can reach, and that can not reach each other: one of them has to go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from culm.cluster.silence import IN_VAIN
from culm.cluster.vigil import Vigil
from culm.testing import reference, simulate
from culm.testing.cluster import Cluster
from culm.testing.machines import node_of
from culm.transport.memory import MemoryNetwork

from .jobs import job

APART = {1, 3}
"""Those that hold stage 1: all that they have to do with each other is its sums."""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sums break off, in every epoch."""
    hears = MemoryNetwork._hears

    def reached(network: MemoryNetwork, me: str, member: str) -> bool:
        return {node_of(me), node_of(member)} != APART and hears(network, me, member)

    monkeypatch.setattr(MemoryNetwork, "_hears", reached)


def test_after_a_few_epochs_in_vain_the_run_goes_on_without_one_of_them(
    apart: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = job(steps=4, exact=True)
    given_up: list[int] = []
    monkeypatch.setattr(Vigil, "give_up", lambda _, node: given_up.append(node))

    async def evict(cluster: Cluster) -> None:
        """As the agent that leads does on a real cluster."""
        while not given_up:
            await asyncio.sleep(1.0)
        cluster.kill(given_up[0])

    ways: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(tmp_path)}
    run = simulate(described, script=evict, cost=lambda *_: 0.01, latency=0.001, **ways)
    assert run.state_sha256 == reference(described).state_sha256
    assert run.summary["preemptions"] == 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["kind"] == "given_up"]
    assert told["node"] in APART
    assert told["why"].startswith(f"{IN_VAIN} epochs brought no step")


def test_who_was_given_up_goes_once() -> None:
    vigil = Vigil(5.0, 0.0)
    vigil.give_up(3)
    assert vigil.as_good_as_gone(0.0) == [3]
    assert vigil.as_good_as_gone(1.0) == []
