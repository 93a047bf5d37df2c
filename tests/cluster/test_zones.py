"""Nodes of a zone are lost together: holders of a layer are in different zones wherever there are several."""

from __future__ import annotations

from typing import Any

import pytest

from culm.cluster.prepare import Request, prepare
from culm.cluster.regroup import first_epoch, seats
from culm.plan.layout import World, arrange_around
from culm.plan.lineage import Standing
from culm.runtime.epoch import Member
from culm.schedule import generate
from culm.testing import Faults, Simulated

from .jobs import job as small
from .reshaping import members, reshaped


def survived(zones: str, lost: str, **request: Any) -> Simulated:
    """All nodes of a zone vanish at once, and nothing is lost."""
    nodes = request["pipelines"] * request["stages"]
    gone = tuple(node for node in range(nodes) if zones[node % len(zones)] == lost)
    return reshaped(zones=zones, faults=Faults().kill(gone, step=3, nth=3), reconfigure="never", **request)


@pytest.mark.parametrize("lost", ["a", "b"])
def test_one_of_two_zones_vanishes(lost: str) -> None:
    """By their numbers nodes 0 and 2 would both hold stage 0, and both are in zone a."""
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


def test_a_newcomer_takes_the_slot_whose_holders_are_elsewhere() -> None:
    setup = prepare(small(), Request(pipelines=2, stages=2, strategy="reroute"))
    old = first_epoch(setup, "leader", tuple(Member(node, f"w{node}") for node in range(4)), None, 0.0)
    left = {0: Standing(versions={0: 3}), 1: Standing(versions={1: 3})}
    zones = {0: "a", 1: "b", 4: "a", 5: "b"}
    come = seats(setup, old, left, 3, [Member(4, "w4"), Member(5, "w5")], zones)
    assert {slot: member.node for slot, member in come.items()} == {2: 5, 3: 4}


def test_a_new_copy_is_made_in_another_zone() -> None:
    full = generate("1f1b", pipelines=2, stages=3, micro_batches=6)
    held = {slot: frozenset({slot % 3}) for slot in range(6) if slot != 0}  # stage 0 has slot 3 alone
    zones = {1: "a", 2: "a", 3: "a", 4: "b", 5: "a"}
    replicas = arrange_around(World(plan=full, strategy="reroute", held=held, zones=zones)).replicas
    assert [(replica.stage, replica.slot) for replica in replicas if replica.fresh] == [(0, 4)]


def test_where_one_zone_has_all_holders_of_a_stage_somebody_elsewhere_with_room_gets_a_copy() -> None:
    """Two stages have both of their holders in zone a. The worker of zone b takes one: it has room for no more."""
    full = generate("1f1b", pipelines=1, stages=3, micro_batches=6)
    held = {0: frozenset({0, 1}), 1: frozenset({0, 1}), 2: frozenset({2})}

    def fresh(zones: dict[int, str]) -> list[int]:
        replicas = arrange_around(World(plan=full, strategy="shadow", held=held, zones=zones)).replicas
        return [replica.stage for replica in replicas if replica.fresh]

    assert fresh({0: "a", 1: "a", 2: "b"}) == [0, 2]
    assert fresh({0: "a", 1: "b", 2: "b"}) == [2], "of stage 2 there is one holder alone"
    assert fresh({0: "a", 1: "a", 2: "a"}) == [2]
    assert fresh({}) == [2]
