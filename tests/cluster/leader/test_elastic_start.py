"""A run begins with the nodes that are there, if they make a complete pipeline, and grows when the others join."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from tests.tiny_jobs import job

from culm.cluster.leader.events import (
    Call,
    Completed,
    Instruction,
    KeyChanged,
    LeaderEvent,
    StartAfterTimer,
    Started,
    StartTimer,
    WriteEvent,
)
from culm.cluster.leader.leader_state import JobFacts, LeaderState
from culm.cluster.prepare_run import prepare_run
from culm.cluster.run_setup import NodeRecord, decode_fleet_progress, encode
from culm.config import RunConfig
from culm.errors import UsageError
from culm.monitor import EvaluationInterval
from culm.runtime.epoch import Epoch
from culm.runtime.messages import decode
from culm.testing import reference, simulate

if TYPE_CHECKING:
    from culm.plan.rent.fleet_decision import FleetProgress
    from culm.testing.simulated_cluster import Cluster

STEPS = 12


def leader_of(strategy: str = "reroute", start_after: float | None = 60.0) -> LeaderState:
    config = RunConfig(pipelines=2, stages=2, strategy=strategy, start_after=start_after)
    state = LeaderState(JobFacts(False, 2, EvaluationInterval()), prepare_run(job(steps=9), config), 0, "agent-0", 0.0)
    feed(state, Started(None, None, {}, None, None), 0.0)
    return state


def feed(state: LeaderState, event: LeaderEvent, now: float) -> list[Instruction]:
    """The instructions that follow from an event, with all calls answered by True."""
    found = state.handle(event, now)
    while found and isinstance(call := found[-1], Call):
        found = found[:-1] + state.handle(Completed(call.number, True), now)
    return found


def join(state: LeaderState, node: int, now: float) -> list[Instruction]:
    record = NodeRecord(node, f"agent-{node}", (f"worker-{node}",), "kind")
    return feed(state, KeyChanged(f"nodes/{node}", encode(record)), now)


def test_the_time_begins_with_the_first_node_and_the_run_when_it_is_over() -> None:
    state = leader_of()
    assert StartTimer(60.0, StartAfterTimer()) in join(state, 0, 1.0)
    assert not any(isinstance(each, StartTimer) for each in join(state, 1, 2.0))
    assert state.epoch is None
    instructions = feed(state, StartAfterTimer(), 61.0)
    assert state.epoch is not None
    assert [member.node for member in state.epoch.present_members] == [0, 1]
    (event,) = [each.event for each in instructions if isinstance(each, WriteEvent)]
    assert event["why"] == "2 of 4 nodes have joined within 60 s: the others get their slots when they join"


def test_a_run_begins_with_the_first_complete_pipeline_if_there_was_none_in_time() -> None:
    state = leader_of()
    join(state, 0, 1.0)
    feed(state, StartAfterTimer(), 61.0)
    assert state.epoch is None
    join(state, 1, 70.0)
    assert state.epoch is not None


@pytest.mark.parametrize(("strategy", "start_after"), [("none", 60.0), ("reroute", None)])
def test_a_run_waits_for_all_nodes_without_the_option_or_if_it_cannot_fill_slots_later(
    strategy: str, start_after: float | None
) -> None:
    state = leader_of(strategy, start_after)
    for node in range(3):
        assert not any(
            isinstance(each, StartTimer) and each.event == StartAfterTimer() for each in join(state, node, 1.0)
        )
    assert state.epoch is None


@pytest.mark.parametrize("there", [2, 3])
@pytest.mark.parametrize("strategy", ["reroute", "shadow", "templates"])
def test_nodes_that_join_later_get_their_slots_and_the_weights_are_those_of_the_reference(
    strategy: str, there: int
) -> None:
    the_job = job(steps=STEPS, exact=True)
    members: list[int] = []

    async def others(cluster: Cluster) -> None:
        await cluster.wait_until_committed(2)
        for _ in range(4 - there):
            cluster.add_node()
        await cluster.wait_until_committed(STEPS - 1)
        epoch = decode(cluster.store.read("epoch") or b"")
        assert isinstance(epoch, Epoch)
        members.extend(member.node for member in epoch.present_members)
        await asyncio.Event().wait()

    run = simulate(
        the_job,
        pipelines=2,
        stages=2,
        strategy=strategy,
        start_after=5.0,
        first_nodes=there,
        script=others,
        cost=lambda *_: 0.1,
    )
    assert run.state_sha256 == reference(the_job).state_sha256
    assert sorted(members) == [0, 1, 2, 3]


def test_a_time_that_is_no_number_is_refused() -> None:
    with pytest.raises(UsageError, match="--start-after is -1"):
        RunConfig(start_after=-1)


def test_the_speed_with_all_nodes_is_estimated_while_there_are_fewer_so_that_a_deadline_can_be_kept() -> None:
    found: list[FleetProgress] = []

    async def watch(cluster: Cluster) -> None:
        await cluster.wait_until_committed(STEPS - 3)
        found.append(decode_fleet_progress(cluster.store.read("progress") or b""))
        await asyncio.Event().wait()

    options: dict[str, Any] = {
        "pipelines": 2,
        "stages": 2,
        "strategy": "reroute",
        "deadline": 1000.0,
        "node_price": 1.0,
    }
    simulate(job(steps=STEPS), start_after=5.0, first_nodes=2, script=watch, cost=lambda *_: 10.0, **options)
    simulate(job(steps=STEPS), script=watch, cost=lambda *_: 10.0, **options)
    few, all_ = (each.full_step_s for each in found)
    assert few is not None
    assert all_ is not None
    assert all_ / 2 <= few <= all_  # the parts of a step that more nodes do not shorten are not known yet
