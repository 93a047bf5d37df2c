"""A run that recovers from losses for weeks does not grow with their number."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import types
from typing import TYPE_CHECKING, Any

import msgspec
from tests.tiny_jobs import job

from culm import Job
from culm.cluster.agent.agent import Agent
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.testing.simulated_cluster import Cluster, simulate
from culm.testing.simulated_machines import SimulatedMachines
from culm.testing.virtual_time import VirtualClock
from culm.transport.frames.simulated_network import SimulatedNetwork

if TYPE_CHECKING:
    import pytest

_SHARED = (
    *(asyncio.AbstractEventLoop, Job, Cluster, VirtualClock, SimulatedNetwork, SimulatedMachines),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType),
)
"""What the nodes of a simulation share, and what is part of the program."""
_ATOMS = (str, bytes, int, float, type(None))
_LEADER, _SURVIVOR, _STEPS_BETWEEN_LOSSES = 0, 1, 3
_FEW, _MANY = 20, 60
_SLACK = (_MANY - _FEW) // 2


class _Measured(Exception):
    """Everything was measured: ends the simulation."""


def test_nodes_hold_no_more_objects_after_many_recoveries_than_after_a_few() -> None:
    """Apart from what each is doing at the moment. A leader keeps the record of each recovery, for the summary."""
    few, many = _objects_after((_FEW, _MANY))
    assert set(few) == {"worker", "agent", "leader"}
    assert min(sum(objects.values()) for objects in few.values()) > 50
    grown = {role: {kind: n - few[role][kind] for kind, n in found.items()} for role, found in many.items()}
    assert grown["leader"].pop("RecoveryRecord") == _MANY - _FEW
    grown["leader"]["tuple"] -= _MANY - _FEW  # the nodes that each record names
    assert [(role, kind, n) for role, each in grown.items() for kind, n in each.items() if n > _SLACK] == []


def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an object of each epoch, as the tests above would see it."""
    from culm.runtime.worker import Worker

    kept: list[Any] = []
    adopt = Worker._adopt_epoch

    async def adopt_and_keep(worker: Worker, epoch: Epoch) -> None:
        if worker.node == _SURVIVOR:
            worker.limits.kept = kept  # type: ignore[attr-defined]
            kept.append(epoch)
        await adopt(worker, epoch)

    monkeypatch.setattr(Worker, "_adopt_epoch", adopt_and_keep)
    few, many = _objects_after((2, 6))
    assert many["worker"]["Epoch"] - few["worker"]["Epoch"] >= 4


def _objects_after(recoveries: tuple[int, int]) -> list[dict[str, collections.Counter[str]]]:
    """The objects that a worker, an agent and the leader hold after so many recoveries, by type."""
    found: list[dict[str, collections.Counter[str]]] = []

    async def lose_nodes(cluster: Cluster) -> None:
        epochs, step = cluster.store.subscribe("epoch"), _STEPS_BETWEEN_LOSSES
        epoch = await _next_full_epoch(epochs, lost=None)
        for number in range(1, recoveries[-1] + 1):
            await cluster.wait_until_committed(step)
            nodes = sorted(member.node for member in epoch.present_members)
            lost = nodes[2 + number % 2]  # of both stages in turn
            cluster.kill(lost)
            cluster.add_node()
            epoch = await _next_full_epoch(epochs, lost)
            committed = cluster.store.subscribe("step")
            step = msgspec.msgpack.decode((await committed.get()).value or b"")["step"] + _STEPS_BETWEEN_LOSSES
            if number in recoveries:
                await cluster.wait_until_committed(step)
                step += _STEPS_BETWEEN_LOSSES
                found.append(_count_objects(cluster))
        raise _Measured

    with contextlib.suppress(_Measured):
        simulate(
            job(steps=10**6, exact=True),
            pipelines=2,
            stages=2,
            strategy="reroute",
            reconfigure="never",
            latency=0.001,
            cost=lambda *_: 0.01,
            script=lose_nodes,
        )
    return found


async def _next_full_epoch(epochs: Any, lost: int | None) -> Epoch:
    """The next epoch in which every slot has a node, and none has the lost one."""
    while True:
        epoch = messages.decode((await epochs.get()).value or b"")
        assert isinstance(epoch, Epoch)
        if None not in epoch.members and lost not in {member.node for member in epoch.present_members}:
            return epoch


def _count_objects(cluster: Cluster) -> dict[str, collections.Counter[str]]:
    gc.collect()
    worker = cluster.workers[_SURVIVOR]
    assert worker.state is not None
    worker.state.spans.clear()  # of the last actions, of which it keeps a fixed number
    agents = {agent.node: agent for agent in gc.get_objects() if isinstance(agent, Agent)}
    assert agents[_LEADER]._leader is not None
    apart = {id(cluster.store), id(worker), id(agents[_LEADER]), id(agents[_SURVIVOR])}
    return {
        "worker": _held_objects(worker, apart),
        "agent": _held_objects(agents[_SURVIVOR], apart),
        "leader": _held_objects(agents[_LEADER], apart),
    }


def _held_objects(root: object, apart: set[int]) -> collections.Counter[str]:
    """The objects that can be reached from another one, by type, without texts and numbers."""
    reached, waiting = {id(root): root}, [root]
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            if id(each) not in reached and id(each) not in apart and not isinstance(each, (*_SHARED, *_ATOMS)):
                reached[id(each)] = each
                waiting.append(each)
    return collections.Counter(type(each).__qualname__ for each in reached.values())
