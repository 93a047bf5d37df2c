"""Faults of what surrounds the nodes: storage, event loops, slow nodes. They cost time, and change nothing else."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.cached_runs import reference_result

from culm import Job
from culm.errors import UsageError
from culm.testing import Faults, SimulatedRun, simulate
from culm.testing.chaos import make_job, random_scenario, random_workers_per_node
from culm.testing.fault_schedule import STORAGE_ERRORS
from culm.testing.random_platform_faults import PlatformLimits, add_platform_faults, lost_nodes
from culm.testing.simulated_cluster import LEASE_S

ODD: Any = "odd"


@functools.cache
def job() -> Job:
    return make_job((), True, 4, 8)


def run_with(faults: Faults, **request: Any) -> SimulatedRun:
    options: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute", **request}
    run = simulate(job(), faults=faults, cost=lambda *_: 0.02, latency=0.001, **options)
    assert run.faults_not_reached(faults) == []
    assert run.state_sha256 == reference_result(job()).state_sha256
    return run


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if event["kind"] == kind]


def test_a_slow_node_changes_nothing_but_time() -> None:
    usual, slow, at_first = (
        run_with(faults).virtual_s
        for faults in (Faults(), Faults().slow_node(1, factor=3), Faults().slow_node(1, factor=3, step=2, seconds=0.5))
    )
    assert usual + 0.2 < at_first < usual + 0.5 < slow < 3 * usual


@pytest.mark.parametrize(("seconds", "lost"), [(15.0, []), (70.0, [[1]])])
def test_a_blocked_event_loop_costs_no_node_unless_it_is_blocked_for_too_long(
    seconds: float, lost: list[list[int]]
) -> None:
    """The session of a node is kept alive for 60 s, many times its lease."""
    run = run_with(Faults().block_loop(1, seconds=seconds, step=2))
    assert [recovery["lost"] for recovery in run.summary["recoveries"]] == lost
    assert min(seconds, 60.0) < run.virtual_s < min(seconds, 60.0) + 10.0


@pytest.mark.parametrize("error", STORAGE_ERRORS)
def test_storage_that_fails_costs_no_step(error: Any, tmp_path: Path) -> None:
    """Steps are committed meanwhile; checkpoints and lines follow."""
    run = run_with(Faults().fail_storage(seconds=3.0, error=error, step=2), out=str(tmp_path), checkpoint_every=2)
    assert run.summary["checkpoints"][-1] == 8
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 8
    assert events(tmp_path, "storage_failed")
    assert events(tmp_path, "storage_recovered")
    last_commit = max(entry.t for entry in run.history.entries if entry.what == "step 7 is committed")
    assert last_commit < 3.0 < run.virtual_s


def test_storage_that_stalls_costs_no_step(tmp_path: Path) -> None:
    run = run_with(Faults().stall_storage(seconds=100.0, step=2), out=str(tmp_path), checkpoint_every=2)
    assert run.summary["checkpoints"][-1] == 8
    assert any("has not answered" in event["why"] for event in events(tmp_path, "storage_failed"))


def test_storage_that_fails_while_all_holders_are_lost_delays_the_restart(tmp_path: Path) -> None:
    faults = Faults().fail_storage(1, seconds=2.0, step=5).kill((0, 2), step=5, nth=3)
    run = run_with(faults, out=str(tmp_path), checkpoint_every=2)
    assert [recovery["source"] for recovery in run.summary["recoveries"]] == ["checkpoint"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Faults().slow_node(1, factor=0), "slow_node: factor is 0: use a number greater than 0"),
        (lambda: Faults().block_loop(1, seconds=-1, step=0), "block_loop: -1 is not a duration"),
        (lambda: Faults().fail_storage(seconds=1, step=0, error=ODD), "fail_storage: error is 'odd'"),
    ],
)
def test_impossible_faults_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        make()


def test_faults_print_as_code() -> None:
    faults = Faults().slow_node(1, factor=2).slow_node(1, factor=3, seconds=0.5, step=1)
    faults = faults.block_loop((0, 1), seconds=2, at="adopt").fail_storage(seconds=1, error="full", step=2)
    faults = faults.stall_storage(2, seconds=5, after_s=0.5)
    assert eval(str(faults), {"Faults": Faults}) == faults


def test_only_survivable_faults_are_drawn() -> None:
    """At most one node may be lost here; node 0 is lost already."""
    limits = PlatformLimits(
        nodes=4,
        steps=4,
        lease_s=LEASE_S,
        survives=lambda lost: len(lost) <= 1,
        recovers=True,
        storage_from=None,
        compares_holders=False,
    )
    lethal = Faults().kill(0, step=1)
    drawn = [add_platform_faults(random.Random(seed), lethal, limits) for seed in range(300)]
    assert {lost_nodes(faults, LEASE_S) for faults in drawn} == {frozenset({0})}
    names = {fault.call_name for faults in drawn for fault in faults.all}
    assert names >= {"slow_node", "block_loop", "flip_frame", "pause_store", "fail"}
    assert names.isdisjoint({"fail_storage", "stall_storage", "flip_memory"})


def test_chaos_draws_every_fault_and_several_workers_per_node() -> None:
    names = {fault.call_name for seed in range(400) for fault in random_scenario(seed).faults.all}
    assert names >= {"slow_node", "block_loop", "flip_frame", "fail_storage", "stall_storage", "pause_store"}
    assert names >= {"fail", "flip_memory"}
    assert {random_workers_per_node(seed) for seed in range(60)} == {1, 2, 3}
    assert {random_workers_per_node(seed, ["none"]) for seed in range(10)} <= {1, 2, 3}
