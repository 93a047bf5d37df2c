"""Nodes of a zone are lost together: holders of a layer are in different zones if there are several."""

from __future__ import annotations

from typing import Any

import pytest
from tests.reshape_runs import members, reshaped
from tests.tiny_jobs import job as small

from culm.cluster.leader.next_epoch import assign_waiting_nodes, first_epoch
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.plan.recover.lineage import WorkerInventory
from culm.plan.recover.role_assignment import SurvivingCluster, assign_roles
from culm.runtime.epoch import Member
from culm.schedule import generate_plan
from culm.strategies import get
from culm.testing import Faults, SimulatedRun


def survived(zones: str, lost: str, **request: Any) -> SimulatedRun:
    """All nodes of a zone vanish at once, and nothing is lost."""
    nodes = request["pipelines"] * request["stages"]
    gone = tuple(node for node in range(nodes) if zones[node % len(zones)] == lost)
    return reshaped(zones=zones, faults=Faults().kill(gone, step=3, nth=3), reconfigure="never", **request)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_one_of_two_zones_vanishes(lost: str) -> None:
    """By number, nodes 0 and 2 would both hold stage 0, and both are in zone a."""
    run = survived("ab", lost, pipelines=2, stages=2)
    assert members(run)[0] != "0 1 2 3"
    assert run.summary["preemptions"] == 2


def test_one_of_three_zones_vanishes() -> None:
    run = survived("abc", "c", pipelines=2, stages=3)
    assert run.summary["preemptions"] == 2


def test_a_zone_vanishes_and_shadows_have_its_stages() -> None:
    run = survived("aabb", "b", pipelines=1, stages=4, strategy="shadow")
    assert run.summary["preemptions"] == 2


def test_after_a_change_of_shape_a_zone_may_vanish_too() -> None:
    faults = Faults().kill((0, 2, 4), step=6, nth=5)
    reshaped((1, "3x2"), zones="ab", faults=faults, pipelines=2, stages=3, reconfigure="never")


def test_without_zones_nodes_fill_slots_in_the_order_of_their_numbers() -> None:
    assert members(reshaped(pipelines=2, stages=2))[0] == "0 1 2 3"


def test_a_joining_node_gets_a_slot_whose_holders_are_in_other_zones() -> None:
    setup = prepare_run(small(), RunConfig(pipelines=2, stages=2, strategy="reroute"))
    old = first_epoch(setup, "leader", tuple(Member(node, f"w{node}") for node in range(4)), None, 0.0)
    left = {0: WorkerInventory(weight_versions={0: 3}), 1: WorkerInventory(weight_versions={1: 3})}
    zones = {0: "a", 1: "b", 4: "a", 5: "b"}
    come = assign_waiting_nodes(setup, old, left, 3, [Member(4, "w4"), Member(5, "w5")], zones)
    assert {slot: member.node for slot, member in come.items()} == {2: 5, 3: 4}


def test_a_new_copy_is_made_in_another_zone() -> None:
    full = generate_plan("1f1b", pipelines=2, stages=3, micro_batches=6)
    held = {slot: frozenset({slot % 3}) for slot in range(6) if slot != 0}  # stage 0 has slot 3 alone
    zones = {1: "a", 2: "a", 3: "a", 4: "b", 5: "a"}
    replicas = assign_roles(
        SurvivingCluster(full_plan=full, policy=get("reroute"), held_stages=held, zones=zones)
    ).shadows
    assert [(replica.stage, replica.slot) for replica in replicas if replica.needs_copy] == [(0, 4)]


def test_if_one_zone_has_all_holders_of_a_stage_another_zone_gets_a_copy() -> None:
    """Two stages have both holders in zone a. The worker of zone b copies one: it has memory for no more."""
    full = generate_plan("1f1b", pipelines=1, stages=3, micro_batches=6)
    held = {0: frozenset({0, 1}), 1: frozenset({0, 1}), 2: frozenset({2})}

    def fresh(zones: dict[int, str]) -> list[int]:
        replicas = assign_roles(
            SurvivingCluster(full_plan=full, policy=get("shadow"), held_stages=held, zones=zones)
        ).shadows
        return [replica.stage for replica in replicas if replica.needs_copy]

    assert fresh({0: "a", 1: "a", 2: "b"}) == [0, 2]
    assert fresh({0: "a", 1: "b", 2: "b"}) == [2], "of stage 2 there is one holder alone"
    assert fresh({0: "a", 1: "a", 2: "a"}) == [2]
    assert fresh({}) == [2]
