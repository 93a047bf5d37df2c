"""The decisions of the fleet controller: values in, actions out, no clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from culm.machines.fleet_controller import (
    DrainMachines,
    FleetAction,
    FleetController,
    FleetTarget,
    GiveUp,
    MachineOffer,
    ReleaseMachines,
    Report,
    RequestMachines,
)
from culm.machines.machine_provider import Machine, MachineNotice, MachineRequest, Market

CHEAP = MachineRequest(count=1, instance="small", zone="a", market="spot")
DEAR = MachineRequest(count=1, instance="small", zone="b", market="spot")
FIRM = MachineRequest(count=1, instance="small", zone="a", market="on-demand")


def controller(
    count: int, *offers: tuple[MachineRequest, float | None], max_price: float = math.inf, on_demand: int = 0
) -> FleetController:
    kinds = tuple(MachineOffer(*offer) for offer in offers or ((CHEAP, 1.0),))
    return FleetController(FleetTarget(count=count, offers=kinds, max_price=max_price, on_demand=on_demand))


def running(*ids: str, market: Market = "spot") -> list[Machine]:
    return [Machine(id=id_, state="running", instance="small", market=market) for id_ in ids]


def ended(id_: str, reason: str = "taken", *, failed: bool = False) -> Machine:
    return Machine(id=id_, state="ended", reason=reason, failed=failed)


def requests(actions: Sequence[FleetAction]) -> list[MachineRequest]:
    return [action.request for action in actions if isinstance(action, RequestMachines)]


def released(actions: Sequence[FleetAction]) -> list[str]:
    return [id_ for action in actions if isinstance(action, ReleaseMachines) for id_ in action.ids]


def reports(actions: Sequence[FleetAction]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Report))


def started(fleet: FleetController, *ids: str, now: float = 0.0) -> None:
    """Let the fleet request and get these machines, which join."""
    (request,) = requests(fleet.decide([], {}, now))
    fleet.handle_granted(request, ids, now)
    assert requests(fleet.decide(running(*ids), dict.fromkeys(ids, True), now)) == []


def test_missing_machines_are_requested_once() -> None:
    fleet = controller(3)
    (request,) = requests(fleet.decide([], {}, 0.0))
    assert (request.count, request.instance, request.zone) == (3, "small", "a")
    fleet.handle_granted(request, ["m1", "m2", "m3"], 0.0)
    assert fleet.decide([], {}, 1.0) == []  # the engine does not list them yet
    assert fleet.decide(running("m1", "m2", "m3"), {}, 2.0) == []


def test_a_lost_machine_is_replaced_and_the_reason_is_reported() -> None:
    fleet = controller(2)
    started(fleet, "m1", "m2")
    actions = fleet.decide([*running("m1"), ended("m2", "the market")], {"m1": True}, 5.0)
    assert [request.count for request in requests(actions)] == [1]
    assert reports(actions) == "machine m2 is gone: the market"


def test_a_machine_that_its_engine_replaces_is_waited_for_and_counts_as_preempted() -> None:
    fleet = controller(2)
    started(fleet, "m1", "m2")
    starting = Machine(id="m2", state="pending", instance="small", market="spot")
    for now in (3600.0, 3700.0, 4200.0):  # a node of the cluster has to be started for it
        assert fleet.decide([*running("m1"), starting], {"m1": True}, now) == []
    assert fleet.experience[0].preemptions == 1
    assert fleet.experience[0].machine_s == 3600.0
    assert fleet.decide(running("m1", "m2"), {"m1": True}, 4300.0) == []
    assert fleet.decide(running("m1", "m2"), {"m1": True, "m2": True}, 4310.0) == []
    assert fleet.experience[0].preemptions == 1


def test_a_notice_brings_the_replacement_before_the_loss() -> None:
    fleet = controller(2)
    started(fleet, "m1", "m2")
    fleet.handle_notice(MachineNotice("m2", 120.0, "rebalance"))
    assert [request.count for request in requests(fleet.decide(running("m1", "m2"), {}, 5.0))] == [1]


def test_an_advised_machine_is_replaced_in_advance_and_leaves_when_its_replacement_has_joined() -> None:
    fleet = controller(2)
    started(fleet, "m1", "m2")
    assert reports(fleet.handle_advice({"m2": "EC2 recommends it"})) == (
        "machine m2 is used until its replacement has joined: EC2 recommends it"
    )
    assert fleet.handle_advice({"m2": "EC2 recommends it"}) == []
    joined = {"m1": True, "m2": True}
    (request,) = requests(fleet.decide(running("m1", "m2"), joined, 5.0))
    assert request.count == 1
    fleet.handle_granted(request, ["m3"], 5.0)
    assert fleet.decide(running("m1", "m2", "m3"), joined, 6.0) == []  # it starts
    assert fleet.decide(running("m1", "m2", "m3"), joined | {"m3": False}, 7.0) == [
        DrainMachines(("m2",), "EC2 recommends it, and its replacement has joined")
    ]
    assert fleet.decide(running("m1", "m2", "m3"), joined | {"m3": True}, 8.0) == []
    assert fleet.decide([*running("m1", "m3"), ended("m2")], {"m1": True, "m3": True}, 9.0) == []
    assert fleet.experience[0].preemptions == 0


def test_an_advised_machine_that_is_taken_away_before_is_replaced_once() -> None:
    fleet = controller(2)
    started(fleet, "m1", "m2")
    fleet.handle_advice({"m2": "EC2 recommends it"})
    (request,) = requests(fleet.decide(running("m1", "m2"), {"m1": True, "m2": True}, 5.0))
    fleet.handle_granted(request, ["m3"], 5.0)
    actions = fleet.decide([*running("m1", "m3"), ended("m2", "the market")], {"m1": True}, 6.0)
    assert (requests(actions), reports(actions)) == ([], "machine m2 is gone: the market")


def test_the_cheapest_offer_is_taken_and_the_next_one_when_it_has_no_more() -> None:
    fleet = controller(4, (DEAR, 2.0), (CHEAP, 1.0))
    (first,) = requests(fleet.decide([], {}, 0.0))
    assert (first.zone, first.count) == ("a", 4)
    said = reports(fleet.handle_granted(first, ["m1"], 0.0))
    assert said.startswith("3 machines (small in a) could not be had")
    (second,) = requests(fleet.decide(running("m1"), {}, 1.0))
    assert (second.zone, second.count) == ("b", 3)


def test_an_offer_whose_machines_are_preempted_often_becomes_the_second_choice() -> None:
    fleet = controller(1, (CHEAP, 1.0), (DEAR, 1.2))
    for number in range(4):
        (request,) = requests(fleet.decide([], {}, number * 600.0))
        if request.zone == "b":
            break
        id_ = f"m{number}"
        fleet.handle_granted(request, [id_], number * 600.0)
        fleet.decide(running(id_), {id_: True}, number * 600.0)
        fleet.decide([ended(id_)], {}, number * 600.0 + 300.0)
        fleet.known.clear()
    assert request.zone == "b"
    assert number > 1


def test_a_price_above_the_limit_is_waited_for() -> None:
    fleet = controller(1, (CHEAP, 3.0), max_price=2.0)
    actions = fleet.decide([], {}, 0.0)
    assert requests(actions) == []
    assert "no kind of machine costs $2/h or less" in reports(actions)
    assert fleet.decide([], {}, 1.0) == []  # said once
    fleet.set_price(CHEAP, 1.5)
    assert len(requests(fleet.decide([], {}, 2.0))) == 1


def test_machines_that_fail_by_themselves_are_tried_with_growing_delay_and_then_given_up() -> None:
    fleet, now = controller(1), 0.0
    asked_at: list[float] = []
    answer: list[FleetAction] = []
    while not any(isinstance(action, GiveUp) for action in answer):
        answer = fleet.decide([], {}, now)
        for request in requests(answer):
            asked_at.append(now)
            fleet.handle_granted(request, [f"m{len(asked_at)}"], now)
            answer = fleet.decide([ended(f"m{len(asked_at)}", "it cannot join", failed=True)], {}, now)
        now += 0.5
        assert now < 100
    assert asked_at == [0.0, 2.0, 6.0]
    assert [a.reason for a in fleet.decide([], {}, now) if isinstance(a, GiveUp)] == [
        "3 machines in a row could not join: it cannot join"
    ]


def test_one_bad_host_is_no_reason_to_give_up_a_run_that_has_others() -> None:
    fleet = controller(2)
    started(fleet, "good", "bad0")
    now = 0.0
    for number in range(6):
        now += 400.0
        fleet.decide([*running("good"), ended(f"bad{number}", failed=True)], {"good": True}, now)
        now += 400.0
        actions = fleet.decide(running("good"), {"good": True}, now)
        assert not any(isinstance(action, GiveUp) for action in actions)
        (request,) = requests(actions)
        fleet.handle_granted(request, [f"bad{number + 1}"], now)


def test_a_machine_that_never_joins_is_released() -> None:
    fleet = controller(2)
    (request,) = requests(fleet.decide([], {}, 0.0))
    fleet.handle_granted(request, ["m1", "m2"], 0.0)
    fleet.decide(running("m1", "m2"), {"m1": True}, 1.0)
    assert released(fleet.decide(running("m1", "m2"), {"m1": True}, 899.0)) == []
    assert released(fleet.decide(running("m1", "m2"), {"m1": True}, 902.0)) == ["m2"]


def test_a_machine_whose_node_does_not_come_back_is_released() -> None:
    fleet = controller(2)
    started(fleet, "m1", "m2", now=1.0)
    fleet.decide(running("m1", "m2"), {"m1": True}, 10.0)
    actions = fleet.decide(running("m1", "m2"), {"m1": True}, 70.0)
    assert released(actions) == ["m2"]
    assert fleet.decide([*running("m1"), ended("m2")], {"m1": True}, 71.0) == []  # its offer waits after the failure
    assert len(requests(fleet.decide(running("m1"), {"m1": True}, 80.0))) == 1


def test_a_machine_without_a_slot_is_released_after_minutes_and_not_replaced() -> None:
    fleet = controller(2)
    started(fleet, "m1", "m2", now=1.0)
    fleet.decide(running("m1", "m2"), {"m1": True, "m2": False}, 10.0)
    assert released(fleet.decide(running("m1", "m2"), {"m1": True, "m2": False}, 611.0)) == ["m2"]
    assert fleet.decide([*running("m1"), ended("m2")], {"m1": True}, 612.0) == []


def test_surplus_machines_are_released_unused_ones_first() -> None:
    fleet = controller(1)
    actions = fleet.decide(running("used", "idle", "absent"), {"used": True, "idle": False}, 0.0)
    assert sorted(released(actions)) == ["absent", "idle"]


def test_on_demand_machines_replace_spot_machines_when_they_are_wanted() -> None:
    fleet = controller(2, (CHEAP, 1.0), (FIRM, 3.0))
    started(fleet, "m1", "m2")
    said = reports(fleet.set_on_demand(1, "spot alone would miss the deadline"))
    assert said == "1 of the machines will be on-demand machines: spot alone would miss the deadline"
    (request,) = requests(fleet.decide(running("m1", "m2"), {"m1": True, "m2": True}, 5.0))
    assert (request.market, request.count) == ("on-demand", 1)
    fleet.handle_granted(request, ["m3"], 5.0)
    machines = [*running("m1", "m2"), *running("m3", market="on-demand")]
    assert released(fleet.decide(machines, {"m1": True, "m2": True, "m3": False}, 6.0)) in (["m1"], ["m2"])


def test_on_demand_machines_are_only_rented_for_a_reason() -> None:
    fleet = controller(2, (CHEAP, 1.0), (FIRM, 3.0))
    fleet.target = replace(fleet.target, market="spot")
    (request,) = requests(fleet.decide([], {}, 0.0))
    fleet.handle_granted(request, [], 0.0)
    assert requests(fleet.decide([], {}, 1.0)) == []  # spot has none for now, and nobody asked for on-demand
    fleet.set_on_demand(1, "the deadline")
    assert [r.market for r in requests(fleet.decide([], {}, 1.5))] == ["on-demand"]
    assert (fleet.lowest_price("spot"), fleet.lowest_price("on-demand")) == (1.0, 3.0)
