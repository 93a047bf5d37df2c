"""Recoveries of lost servers, and the version that a generation starts from."""

from __future__ import annotations

from culm.gnn.leader.gnn_leader import newest_common_version
from culm.gnn.leader.server_recoveries import ServerRecoveries


def test_a_generation_starts_from_the_newest_common_version() -> None:
    assert newest_common_version([[10, 20], [20, 30]]) == 20
    assert newest_common_version([[30], [20]]) == 0
    assert newest_common_version([[], []]) == 0


def test_a_recovery_lasts_from_the_first_sign_to_the_former_epoch() -> None:
    recoveries = ServerRecoveries()
    recoveries.record_first_sign(10.0)
    recoveries.record_server_lost("graph-1", 10.5)
    recoveries.record_generation_start(10.6, version=8, epochs_done=11)
    recoveries.record_members_complete(12.0)
    recoveries.record_epochs_done(10, 12.5)
    assert recoveries.summary_rows(12.5)[0]["redo_ms"] == 500.0
    recoveries.record_epochs_done(11, 13.0)
    recoveries.record_epochs_done(12, 14.0)
    assert recoveries.summary_rows(99.0) == [
        {"step": 8, "lost": ["graph-1"], "detect_ms": 500.0, "decide_ms": 100.0, "move_ms": 1400.0, "redo_ms": 1000.0,
         "redone_actions": 3, "source": "checkpoint"}
    ]  # fmt: skip


def test_servers_lost_during_a_recovery_belong_to_it_and_later_ones_do_not() -> None:
    recoveries = ServerRecoveries()
    recoveries.record_server_lost("graph-0", 1.0)
    recoveries.record_generation_start(1.1, version=0, epochs_done=4)
    recoveries.record_server_lost("parameter-0", 1.2)
    recoveries.record_generation_start(1.3, version=0, epochs_done=4)
    recoveries.record_members_complete(2.0)
    recoveries.record_server_lost("graph-1", 3.0)
    recoveries.record_generation_start(3.1, version=0, epochs_done=4)
    recoveries.record_members_complete(4.0)
    recoveries.record_epochs_done(4, 5.0)
    assert [row["lost"] for row in recoveries.summary_rows(9.0)] == [["graph-0", "parameter-0"], ["graph-1"]]
    assert [row["redo_ms"] for row in recoveries.summary_rows(9.0)] == [1000.0, 1000.0]


def test_a_broken_connection_without_a_lost_server_is_no_recovery() -> None:
    recoveries = ServerRecoveries()
    recoveries.record_first_sign(1.0)
    recoveries.record_generation_start(2.0, version=0, epochs_done=0)
    recoveries.record_members_complete(3.0)
    assert recoveries.summary_rows(4.0) == []
