"""The hang detector finds a worker that hangs under a live agent."""

from __future__ import annotations

import pytest

from culm.cluster.leader.hang_detector import HangDetector
from culm.plan.recover.lineage import WorkerInventory
from culm.runtime.messages import HaltReport, Heartbeat


def send_heartbeats(
    detector: HangDetector, nodes: str, *, since: float, until: float, epoch: int = 1, slowest_s: float = 0.0
) -> None:
    """Let nodes send a heartbeat once a second."""
    for second in range(round(since), round(until) + 1):
        for node in map(int, nodes):
            detector.handle_message(Heartbeat(node, epoch, second, slowest_s), float(second))


def test_a_worker_without_heartbeats_is_found_after_twice_suspect_after() -> None:
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "012", since=0, until=10)
    send_heartbeats(detector, "02", since=11, until=20)
    assert detector.hung_nodes(20.0) == []
    send_heartbeats(detector, "02", since=21, until=22)
    assert detector.hung_nodes(22.0) == [1]


def test_a_worker_may_be_silent_for_five_of_its_longest_actions() -> None:
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "01", since=0, until=10, slowest_s=4.0)
    send_heartbeats(detector, "0", since=11, until=38)
    assert detector.hung_nodes(38.0) == []
    send_heartbeats(detector, "0", since=39, until=45)
    assert detector.hung_nodes(45.0) == [1]


def test_known_action_times_count_from_the_first_heartbeat_on() -> None:
    detector = HangDetector(5.0, 10.0)
    send_heartbeats(detector, "01", since=0, until=1)
    send_heartbeats(detector, "0", since=2, until=50)
    assert detector.hung_nodes(50.0) == []


def test_without_any_heartbeat_no_worker_is_found() -> None:
    """The epoch may be over, or this agent may have been paused."""
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "01", since=0, until=10)
    assert detector.hung_nodes(1000.0) == []


def test_a_worker_before_its_first_heartbeat_has_a_minute() -> None:
    """The epoch may not have reached it yet, because the store was unreachable."""
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "01", since=0, until=10)
    detector.expect_heartbeats(2, [0, 1], 10.5)
    send_heartbeats(detector, "0", since=11, until=70, epoch=2)
    assert detector.hung_nodes(70.0) == []
    send_heartbeats(detector, "0", since=71, until=71, epoch=2)
    assert detector.hung_nodes(71.0) == [1]


def test_a_heartbeat_may_arrive_before_its_epoch_is_known() -> None:
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "0", since=0, until=0)
    detector.expect_heartbeats(1, [0, 1], 0.5)
    send_heartbeats(detector, "1", since=1, until=11)
    assert detector.hung_nodes(11.0) == [0]


def test_a_member_that_does_not_answer_the_first_halt_of_a_new_leader_is_found() -> None:
    detector = HangDetector(5.0, 0.0)
    detector.expect_heartbeats(4, [0, 1, 2], 0.0)
    for node in (0, 2):
        detector.handle_message(HaltReport(node, 5, WorkerInventory()), 1.0)
    assert detector.hung_nodes(61.0) == []
    assert detector.hung_nodes(61.5) == [1]


def test_a_worker_that_does_not_answer_a_halt_is_found() -> None:
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "012", since=0, until=10)
    for node in (0, 2):
        detector.handle_message(HaltReport(node, 2, WorkerInventory()), 11.0)
    assert detector.hung_nodes(20.0) == []
    assert detector.hung_nodes(22.0) == [1]
    detector.handle_message(HaltReport(1, 2, WorkerInventory()), 22.5)
    assert detector.hung_nodes(23.0) == []


def test_an_answer_to_an_earlier_halt_does_not_count() -> None:
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "01", since=0, until=10)
    detector.handle_message(HaltReport(0, 3, WorkerInventory()), 11.0)
    detector.handle_message(HaltReport(1, 2, WorkerInventory()), 11.0)
    assert detector.hung_nodes(30.0) == [1]


@pytest.mark.parametrize("epoch", [0, 1])
def test_heartbeats_of_earlier_epochs_are_ignored(epoch: int) -> None:
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "01", since=0, until=10, epoch=2)
    send_heartbeats(detector, "0", since=11, until=30, epoch=2)
    send_heartbeats(detector, "1", since=11, until=30, epoch=epoch)
    assert detector.hung_nodes(30.0) == [1]


def test_a_node_hangs_if_one_of_its_workers_does() -> None:
    """Workers 2 and 3 belong to node 1."""
    detector = HangDetector(5.0, 0.0, workers_per_node=2)
    detector.expect_heartbeats(1, range(4), 0.0)
    for second in range(100):
        for worker in (0, 1, 2):
            detector.handle_message(Heartbeat(worker, 1, second, 0.1), float(second))
    assert detector.take_nodes_to_evict(99.0) == [1]


def test_after_a_pause_of_the_leaders_machine_no_node_counts_as_hung() -> None:
    """Heartbeats of that time may not have been read yet."""
    detector = HangDetector(5.0, 0.0)
    send_heartbeats(detector, "01", since=0, until=10)
    assert detector.take_nodes_to_evict(10.0) == []
    detector.handle_message(Heartbeat(0, 1, 11, 0.0), 60.0)
    assert detector.take_nodes_to_evict(60.0) == []
    for second in range(61, 80):
        detector.handle_message(Heartbeat(0, 1, second, 0.0), float(second))
        found = detector.take_nodes_to_evict(float(second))
    assert found == [1]
