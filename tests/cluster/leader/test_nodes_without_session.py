"""Members without a session in the store, when something else happens to them: a notice, an exception, an eviction, a
loss of other nodes, another leader."""

from __future__ import annotations

import pytest
from tests.cluster.leader.test_leader_state import NODES, Driver, epoch_without, expired_sessions, rejoin

from culm.cluster.leader.events import (
    Completed,
    Instruction,
    KeyChanged,
    NodeEvicted,
    PlannedEpoch,
    PlanRecovery,
    SendMessage,
    SessionTimer,
)
from culm.cluster.leader.next_epoch import recovery_epoch
from culm.cluster.leader.phases import Phase
from culm.cluster.run_setup import NodeRecord, encode
from culm.runtime import messages


def lose_session(leader: Driver, node: int) -> None:
    """The session of a node ends while it computes."""
    leader.ended = ()
    leader.feed(messages.Heartbeat(node, leader.state.epoch_number, 7, 0.1))
    leader.lose(node)
    assert node in leader.state.handlers.epoch_change.returning_nodes.without_session


def begin_planned_epoch(leader: Driver) -> None:
    """The epoch that was planned begins, and all of its members build their layers."""
    body, old = leader.plans[-1].body, leader.state.epoch
    assert isinstance(body, PlanRecovery)
    assert old is not None
    found = recovery_epoch(
        leader.state.setup,
        old,
        body.number,
        "agent-0",
        body.inventories,
        body.committed,
        leaving_slots=body.leaving_slots,
        failed_slots=body.failed_slots,
    )
    leader.feed(Completed(leader.plans[-1].number, PlannedEpoch(found.epoch, "", "peers", False)))
    for member in found.epoch.present_members:
        leader.feed(messages.LayersReady(member.worker, body.number, 0.1))


def commit(leader: Driver, step: int) -> None:
    number = leader.state.epoch_number
    for worker in sorted(leader.state.members.required_workers):
        loss, weight = (1.0, 4.0) if worker % 2 else (None, None)
        runs = messages.count_runs((1,) * 4, (1,) * 4)
        leader.feed(messages.StepReport(worker, number, step, leader.now, runs, loss, weight))


def dismissed(instructions: list[Instruction]) -> list[str]:
    """The agents that are told that the run continues without them."""
    sent = [each for each in instructions if isinstance(each, SendMessage)]
    return [each.address for each in sent if isinstance(messages.decode(each.body), messages.Dismiss)]


def test_the_last_awaited_node_may_come_back_with_a_notice() -> None:
    leader = expired_sessions()
    leader.report(*range(NODES))
    rejoin(leader, 1)
    rejoin(leader, 2)
    leader.feed(KeyChanged("nodes/3", encode(NodeRecord(3, "agent-3", ("worker-3",), "kind", 30.0))))
    assert len(leader.plans) == 1
    assert leader.state.members.leave_deadlines.keys() == {3}


def test_a_node_that_raises_without_a_session_is_given_up_and_does_not_come_back() -> None:
    leader = Driver()
    leader.commit(0)
    lose_session(leader, 3)
    leader.fail(3)
    leader.report(*range(NODES))
    begin_planned_epoch(leader)
    commit(leader, 1)
    assert leader.state.members.departed_nodes == {3}
    assert dismissed(rejoin(leader, 3)) == ["agent-3"]


def test_a_node_that_was_let_go_does_not_come_back_while_others_are_lost() -> None:
    leader = Driver()
    leader.state.members.leave_deadlines[3] = 60.0  # it is slow, and another one takes its place
    leader.state.release_node(leader.state.members.nodes[3])
    leader.lose(2)
    assert dismissed(rejoin(leader, 3)) == ["agent-3"]
    assert leader.state.members.departed_nodes == {2, 3}


@pytest.mark.parametrize("again", [False, True])
def test_the_wait_for_others_does_not_count_as_silence(again: bool) -> None:
    """A node that has answered a halt sends nothing until the next epoch, or the next halt."""
    leader = Driver()
    lose_session(leader, 2)
    leader.ended = ("worker-3", "worker-1")
    leader.lose(3)
    leader.report(0, 1, 2)
    leader.now += 30.0
    if again:
        leader.lose(1)
    else:
        leader.feed(Completed(leader.plans[0].number, PlannedEpoch(epoch_without(leader, 3), "", "peers", False)))
    leader.feed(SessionTimer())
    assert 2 not in leader.state.members.departed_nodes
    leader.now += 30.0
    leader.feed(SessionTimer())
    assert 2 in leader.state.members.departed_nodes


def test_an_awaited_node_that_is_evicted_is_lost_at_once() -> None:
    leader = expired_sessions()
    leader.feed(NodeEvicted(2))
    assert (leader.state.phase, leader.state.members.departed_nodes) == (Phase.HALTING, {2})


def test_a_node_without_a_session_is_awaited_by_every_next_leader() -> None:
    leader = Driver()
    leader.commit(0)
    lose_session(leader, 3)
    for gone, successor in ((0, 1), (1, 2)):
        leader.state.members.nodes.pop(3, None)  # it has no record in the store
        leader.ended = (f"worker-{gone}",)
        leader.replace_leader(lost=gone, successor=successor)
        assert leader.state.handlers.epoch_change.returning_nodes.awaited == {3}
    assert leader.state.members.departed_nodes == {0, 1}
    rejoin(leader, 3)
    leader.report(2, 3)
    assert len(leader.plans) == 1
