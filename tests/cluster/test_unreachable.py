"""Two nodes that everybody else can reach, and that can not reach each other: one of them has to go."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from culm.cluster.probation import Probation
from culm.cluster.setup import NodeRecord
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


def test_a_machine_that_was_given_up_twice_does_not_hold_the_run_up_a_third_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches the store and so comes back each time, but never the one that it missed."""
    described = job(steps=40, exact=True)
    given_up: list[int] = []
    machine = {1: 1, 3: 3}
    hears = MemoryNetwork._hears

    def reached(network: MemoryNetwork, me: str, member: str) -> bool:
        return {machine.get(node_of(me)), machine.get(node_of(member))} != APART and hears(network, me, member)

    def give_up(vigil: Vigil, node: int) -> None:
        vigil.condemned.add(node)
        given_up.append(node)

    async def come_back(cluster: Cluster) -> None:
        seen = 0
        while True:
            await asyncio.sleep(0.1)
            for node in given_up[seen:]:
                cluster.kill(node)
                machine[cluster.add()] = machine[node]
            seen = len(given_up)

    monkeypatch.setattr(MemoryNetwork, "_hears", reached)
    monkeypatch.setattr(NodeRecord, "host", property(lambda record: f"machine {machine.get(record.node)}"))
    monkeypatch.setattr(Vigil, "give_up", give_up)
    ways: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(tmp_path)}
    run = simulate(described, script=come_back, cost=lambda *_: 0.01, latency=0.001, **ways)
    assert run.state_sha256 == reference(described).state_sha256
    fallen = [machine[node] for node in given_up]
    assert max(fallen.count(each) for each in APART) == 2
    assert len(fallen) <= 3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (waits,) = [event["node"] for event in events if event["kind"] == "on_probation"]
    assert waits == max(machine)


def test_each_time_a_machine_waits_twice_as_long_and_then_may_come_in() -> None:
    probation = Probation()
    waits = []
    for _ in range(4):
        probation.fell("10.0.0.7", 100.0, doubt_s=11.0)
        waits.append(probation.left_s("10.0.0.7", 100.0))
    assert waits == [0.0, 88.0, 176.0, 352.0]
    assert probation.left_s("10.0.0.7", 452.0) == 0.0
    assert probation.left_s("10.0.0.8", 100.0) == 0.0
