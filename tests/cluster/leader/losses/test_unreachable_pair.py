"""Two nodes that can reach all others but not each other: one of them has to be removed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.cluster.leader.failure_detector import MAX_FRUITLESS_EPOCHS
from culm.cluster.leader.hang_detector import HangDetector
from culm.cluster.leader.membership import HostBackoff
from culm.cluster.run_setup import NodeRecord
from culm.testing import reference, simulate
from culm.testing.simulated_cluster import Cluster
from culm.testing.simulated_machines import node_of
from culm.transport.frames.simulated_network import SimulatedNetwork

APART = {1, 3}
"""The holders of stage 1: they only exchange its sums."""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their reduces fail in every epoch."""
    hears = SimulatedNetwork._is_connected

    def reached(network: SimulatedNetwork, me: str, member: str) -> bool:
        return {node_of(me), node_of(member)} != APART and hears(network, me, member)

    monkeypatch.setattr(SimulatedNetwork, "_is_connected", reached)


def test_after_several_epochs_without_a_commit_one_of_the_pair_is_removed(
    apart: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = job(steps=4, exact=True)
    given_up: list[int] = []
    monkeypatch.setattr(HangDetector, "request_eviction", lambda _, node: given_up.append(node))

    async def evict(cluster: Cluster) -> None:
        """Evict nodes as the leader's agent does on a real cluster."""
        while not given_up:
            await asyncio.sleep(1.0)
        cluster.kill(given_up[0])

    ways: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(tmp_path)}
    run = simulate(described, script=evict, cost=lambda *_: 0.01, latency=0.001, **ways)
    assert run.state_sha256 == reference(described).state_sha256
    assert run.summary["preemptions"] == 1
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["kind"] == "given_up"]
    assert event["node"] in APART
    assert event["why"].startswith(f"no step in {MAX_FRUITLESS_EPOCHS} epochs")


def test_an_eviction_is_requested_once() -> None:
    detector = HangDetector(5.0, 0.0)
    detector.request_eviction(3)
    assert detector.take_nodes_to_evict(0.0) == [3]
    assert detector.take_nodes_to_evict(1.0) == []


def test_a_host_evicted_twice_is_kept_out_by_its_backoff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the store and therefore rejoins each time, but never reaches its counterpart."""
    described = job(steps=40, exact=True)
    given_up: list[int] = []
    machine = {1: 1, 3: 3}
    hears = SimulatedNetwork._is_connected

    def reached(network: SimulatedNetwork, me: str, member: str) -> bool:
        return {machine.get(node_of(me)), machine.get(node_of(member))} != APART and hears(network, me, member)

    def give_up(detector: HangDetector, node: int) -> None:
        detector.evicted_nodes.add(node)
        given_up.append(node)

    async def come_back(cluster: Cluster) -> None:
        seen = 0
        while True:
            await asyncio.sleep(0.1)
            for node in given_up[seen:]:
                cluster.kill(node)
                machine[cluster.add_node()] = machine[node]
            seen = len(given_up)

    monkeypatch.setattr(SimulatedNetwork, "_is_connected", reached)
    monkeypatch.setattr(NodeRecord, "host", property(lambda record: f"machine {machine.get(record.node)}"))
    monkeypatch.setattr(HangDetector, "request_eviction", give_up)
    ways: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", "out": str(tmp_path)}
    run = simulate(described, script=come_back, cost=lambda *_: 0.01, latency=0.001, **ways)
    assert run.state_sha256 == reference(described).state_sha256
    fallen = [machine[node] for node in given_up]
    assert max(fallen.count(each) for each in APART) == 2
    assert len(fallen) <= 3
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (waits,) = [event["node"] for event in events if event["kind"] == "on_probation"]
    assert waits == max(machine)


def test_the_backoff_of_a_host_doubles_each_time() -> None:
    backoff = HostBackoff()
    waits = []
    for _ in range(4):
        backoff.record_failure("10.0.0.7", 100.0, suspicion_s=11.0)
        waits.append(backoff.remaining_s("10.0.0.7", 100.0))
    assert waits == [0.0, 88.0, 176.0, 352.0]
    assert backoff.remaining_s("10.0.0.7", 452.0) == 0.0
    assert backoff.remaining_s("10.0.0.8", 100.0) == 0.0
