"""Sessions in the store that expire although the nodes run: the nodes rejoin with their state, and no bit differs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import run_with_faults

from culm import Job
from culm.cluster.leader.output import input_log
from culm.errors import CulmError, NodeLost, RunError
from culm.testing import Cluster, Faults, SimulatedRun, simulate
from culm.testing.chaos import make_job
from culm.testing.simulated_cluster import LEASE_S

TWO_BY_TWO: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}
EVERYBODY = range(4)
LONG_S = 5 * LEASE_S
LONG_JOB: dict[str, Any] = {"cost": lambda *_: 0.5}
"""Virtual seconds of an action: the run takes longer than the faults."""
MOMENTS = ("0F0", "1F1", "1B0", "0B1", "0R", "1S", "0S+", "commit")


@functools.cache
def job() -> Job:
    return make_job((), True, 4)


def run_small_job(faults: Faults, **more: Any) -> SimulatedRun:
    return run_with_faults(job(), faults, **{**TWO_BY_TWO, **more})


def text(run: SimulatedRun) -> str:
    return str(run.history)


@pytest.mark.parametrize("at", MOMENTS)
def test_a_store_that_hangs_for_longer_than_a_lease_loses_no_node(at: str) -> None:
    run = run_small_job(Faults().pause_store(tuple(EVERYBODY), seconds=LONG_S, at=at, step=2))
    assert run.summary["preemptions"] == 0
    assert text(run).count("has a new session in the store") == 4
    assert (run.summary["samples_lost"], run.summary["samples_duplicated"]) == (0, 0)


@pytest.mark.parametrize("at", MOMENTS)
def test_machines_that_all_stand_still_for_longer_than_a_lease_lose_no_node(at: str) -> None:
    run = run_small_job(Faults().pause(tuple(EVERYBODY), seconds=LONG_S, at=at, step=2))
    assert run.summary["preemptions"] == 0
    assert text(run).count("has a new session in the store") == 4


@pytest.mark.parametrize("expired", [(0,), (3,), (0, 1), (2, 3), (1, 2), (0, 1, 2), (1, 2, 3)])
def test_if_some_sessions_expire_the_nodes_return_with_their_state(expired: tuple[int, ...]) -> None:
    run = run_small_job(Faults().pause_store(seconds=LONG_S, expired=expired, at="1F0", step=2, node=1))
    assert run.summary["preemptions"] == 0


@pytest.mark.parametrize("nth", [1, 4, 7])
@pytest.mark.parametrize("node", [1, 2, 3])
def test_a_node_that_cannot_reach_the_store_keeps_computing(node: int, nth: int) -> None:
    """No epoch ends for it, and it is back with its state."""
    run = run_small_job(Faults().cut_off_store(node, seconds=3 * LEASE_S, step=1, nth=nth), **LONG_JOB)
    assert (run.summary["preemptions"], run.summary["recoveries"]) == (0, [])
    assert text(run).count("has a new session in the store") == 1


@pytest.mark.parametrize("at", ["0F0", "0B1", "0R", "0S+", "commit"])
def test_a_leader_that_cannot_reach_the_store_is_replaced_and_its_node_keeps_its_state(at: str) -> None:
    run = run_small_job(Faults().cut_off_store(0, seconds=2 * LEASE_S, at=at, step=1), **LONG_JOB)
    assert run.summary["preemptions"] == 0
    assert text(run).count("has a new session in the store") == 1


def test_a_leader_that_cannot_reach_the_store_for_long_is_not_waited_for() -> None:
    run = run_small_job(Faults().cut_off_store(0, seconds=20 * LEASE_S, at="0F0", step=1), **LONG_JOB)
    assert run.summary["preemptions"] == 1


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_node_without_a_session_takes_part_in_the_recovery_of_another(killed: int) -> None:
    """Node 3 is out of reach of the store when the other node is killed: the leader sends it the next epoch."""
    faults = Faults().cut_off_store(3, seconds=6 * LEASE_S, step=1).kill(killed, after_s=5 * LEASE_S)
    run = run_small_job(faults, **LONG_JOB)
    assert run.summary["preemptions"] == 1
    assert text(run).count("has a new session in the store") == 1


def test_a_node_without_a_session_that_is_killed_is_lost() -> None:
    faults = Faults().cut_off_store(3, seconds=8 * LEASE_S, step=1).kill(3, after_s=5 * LEASE_S)
    assert [each["lost"] for each in run_small_job(faults, **LONG_JOB).summary["recoveries"]] == [[3]]


def test_a_node_without_a_session_that_makes_no_progress_is_lost() -> None:
    faults = Faults().cut_off_store(3, seconds=8 * LEASE_S, step=1)
    run = run_small_job(faults.partition(3, seconds=20 * LEASE_S, after_s=5 * LEASE_S), **LONG_JOB)
    assert [each["lost"] for each in run.summary["recoveries"]] == [[3]]


def test_a_node_without_a_session_is_lost_when_its_time_is_over() -> None:
    faults = Faults().cut_off_store(3, seconds=10 * LEASE_S, step=1)
    run = run_small_job(faults, rejoin_within=2 * LEASE_S, **LONG_JOB)
    assert [each["lost"] for each in run.summary["recoveries"]] == [[3]]


@pytest.mark.parametrize("frozen", [(0, 2), (1, 3), (0, 1, 2), (1, 2, 3)])
def test_if_all_holders_of_a_stage_stand_still_the_others_wait_for_them(frozen: tuple[int, ...]) -> None:
    run = run_small_job(Faults().pause(frozen, seconds=10 * LONG_S, at=f"{frozen[0] % 2}B1", step=2))
    assert run.summary["preemptions"] < len(frozen)
    assert run.virtual_s > 10 * LONG_S - 1


def test_a_latecomer_is_fenced(tmp_path: Path) -> None:
    """Node 3 wakes up when an epoch without it has been published: it ends, and nothing that it sends counts."""
    faults = Faults().pause_store((0,), seconds=LONG_S, at="0F1", step=1).pause(3, seconds=5 * LONG_S, at="1F2", step=1)
    run = run_small_job(faults)
    assert [each["lost"] for each in run.summary["recoveries"]] == [[3]]


def test_with_a_checkpoint_the_run_returns_to_it_instead_of_waiting(tmp_path: Path) -> None:
    faults = Faults().pause((1, 3), seconds=100 * LONG_S, at="1B1", step=2)
    run = run_small_job(faults, out=str(tmp_path), checkpoint_every=1)
    assert run.virtual_s < 10 * LONG_S
    assert run.summary["samples_redone"] > 0 or run.summary["preemptions"] == 2


def test_without_a_checkpoint_the_run_ends_when_the_time_is_over() -> None:
    faults = Faults().pause((1, 3), seconds=1000 * LONG_S, at="1B1", step=2)
    with pytest.raises(NodeLost, match="node 1 was lost in step 2 and no other node holds its layers"):
        simulate(job(), faults=faults, rejoin_within=60.0, **TWO_BY_TWO)


def test_nodes_that_were_killed_are_not_waited_for() -> None:
    with pytest.raises(NodeLost) as raised:
        simulate(job(), faults=Faults().kill((1, 3), at="1B1", step=2), **TWO_BY_TWO)
    assert "waiting" not in "".join(raised.value.__notes__)


def test_without_time_to_rejoin_nodes_end_with_their_sessions() -> None:
    faults = Faults().pause_store(seconds=LONG_S, at="0F1", step=1)
    with pytest.raises(CulmError):
        simulate(job(), faults=faults, rejoin_within=0.0, **TWO_BY_TWO)


@pytest.mark.parametrize("nth", range(1, 30, 2))
def test_sessions_may_expire_at_any_moment_of_a_recovery(nth: int) -> None:
    """Node 3 is killed; from there on each moment of some node is tried."""
    faults = Faults().kill(3, at="1B2", step=1).pause_store((0, 1, 2), seconds=LONG_S, step=2, nth=nth)
    assert run_small_job(faults).summary["preemptions"] == 1


@pytest.mark.parametrize("moment", ["inventory", "adopt"])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_sessions_may_expire_while_an_epoch_changes(moment: str, node: int) -> None:
    nth = 2 if moment == "adopt" else 1
    faults = Faults().kill(3, at="1B2", step=1).pause_store(node, seconds=LONG_S, at=moment, nth=nth)
    assert run_small_job(faults).summary["preemptions"] == 1


@pytest.mark.parametrize("strategy", ["shadow", "shadow-lazy", "templates", "checkpoint", "migrate"])
def test_every_strategy_that_survives_losses_keeps_its_nodes(strategy: str, tmp_path: Path) -> None:
    faults = Faults().pause_store(seconds=LONG_S, at="0F1", step=2)
    run = run_small_job(faults, strategy=strategy, out=str(tmp_path), checkpoint_every=1)
    assert run.summary["preemptions"] == 0


def test_nodes_with_several_workers_keep_their_state() -> None:
    faults = Faults().pause_store(seconds=LONG_S, at="0F1", step=2)
    run = run_small_job(faults, workers_per_node=2, stages=2, pipelines=2)
    assert run.summary["preemptions"] == 0


def test_sessions_may_expire_twice(tmp_path: Path) -> None:
    faults = Faults().pause_store(seconds=LONG_S, at="0F1", step=1).pause_store(seconds=LONG_S, at="0F1", step=2)
    run = run_small_job(faults, out=str(tmp_path))
    assert run.summary["preemptions"] == 0
    for path in tmp_path.glob(input_log.FILE_PATTERN):
        assert input_log.replay(path)[1] is None


def test_a_store_that_has_lost_its_data_ends_the_run() -> None:
    async def lose_data(cluster: Cluster) -> None:
        await cluster.wait_until_committed(1)
        cluster.machines.start_store_outage(LONG_S)
        for key in ("setup", "epoch", "record", "leader", *(f"nodes/{node}" for node in EVERYBODY)):
            cluster.store.delete(key)
        cluster.machines.expire_sessions(None)

    with pytest.raises(RunError, match="all nodes have ended before the run"):
        simulate(job(), script=lose_data, **TWO_BY_TWO)
