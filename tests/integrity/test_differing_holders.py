"""Holders of a layer are compared at every checkpoint. A flipped bit in the memory of one never reaches the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.checkpoint import CheckpointCatalog, Storage
from culm.cluster.leader.checkpoints.replica_check import compare_holders, contradicted_by_replay
from culm.errors import RunError
from culm.testing import Faults, reference, simulate

JOB = job(exact=True, steps=9)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def run(folder: Path, faults: Faults = Faults(), **shape: Any) -> Any:  # noqa: B008
    request = {"stages": 2, "strategy": "reroute", "checkpoint_every": 2, "out": str(folder), **shape}
    return simulate(JOB, faults=faults, **request)


@pytest.mark.parametrize("shape", [{"pipelines": 2}, {"pipelines": 1, "strategy": "shadow"}], ids=["peers", "shadow"])
def test_a_checkpoint_whose_holders_agree_is_verified(tmp_path: Path, shape: dict[str, Any]) -> None:
    run(tmp_path, **shape)
    assert {event["verified"] for event in events(tmp_path, "checkpoint")} == {True}
    catalog = CheckpointCatalog(Storage(str(tmp_path / "checkpoints")))
    assert all(catalog.check(step).verified for step in catalog.steps())


def test_a_checkpoint_of_layers_with_one_holder_is_not_verified(tmp_path: Path) -> None:
    run(tmp_path, pipelines=1, strategy="checkpoint")
    assert {event["verified"] for event in events(tmp_path, "checkpoint")} == {False}


@pytest.mark.parametrize("node", [0, 3])
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_of_three_holders_the_majority_identifies_the_faulty_node(tmp_path: Path, node: int, step: int) -> None:
    faults = Faults().flip_memory(node, step)
    ran = run(tmp_path, faults, pipelines=3)
    assert not ran.faults_not_reached(faults)
    assert (ran.weights_sha256, ran.summary["corruptions"]) == (reference(JOB).weights_sha256, 1)
    (found,) = events(tmp_path, "corruption")
    assert found["node"] == node
    assert [event["node"] for event in events(tmp_path, "quarantined")] == [node]
    assert [event["node"] for event in events(tmp_path, "lost")] == [node]


@pytest.mark.parametrize("node", [0, 3])
def test_the_next_leader_returns_to_the_verified_checkpoint_too(tmp_path: Path, node: int) -> None:
    """The leader, which may be the faulty node itself, vanishes after it has found the difference."""
    faults = Faults().flip_memory(node, 4).kill(0, at="inventory")
    ran = run(tmp_path, faults, pipelines=3)
    assert not ran.faults_not_reached(faults)
    assert ran.weights_sha256 == reference(JOB).weights_sha256
    assert ran.summary["corruptions"] == 1


@pytest.mark.parametrize("node", [1, 2])
def test_of_two_holders_the_replay_identifies_the_faulty_node(tmp_path: Path, node: int) -> None:
    """The bit flips after the last step before the comparison, and before it changes a gradient."""
    faults = Faults().flip_memory(node, 5, at=f"{node % 2}S+")
    ran = run(tmp_path, faults, pipelines=2)
    assert not ran.faults_not_reached(faults)
    assert ran.weights_sha256 == reference(JOB).weights_sha256
    (found,) = events(tmp_path, "corruption")
    assert (found["node"], found["step"]) == (None, 6)
    assert "replay" in found["why"]
    assert not events(tmp_path, "corruption_unresolved")
    assert [event["node"] for event in events(tmp_path, "quarantined")] == [node]
    assert [event["step"] for event in events(tmp_path, "rewound")] == [4]


def test_the_next_leader_waits_for_the_replay_too(tmp_path: Path) -> None:
    """The leader vanishes after the difference was found; the replay of its successor identifies the faulty node."""
    faults = Faults().flip_memory(1, 5, at="1S+").kill(0, at="inventory")
    ran = run(tmp_path, faults, pipelines=2)
    assert not ran.faults_not_reached(faults)
    assert ran.weights_sha256 == reference(JOB).weights_sha256
    assert [event["node"] for event in events(tmp_path, "quarantined")] == [1]


def test_if_wrong_weights_have_changed_all_gradients_the_faulty_node_is_not_known(tmp_path: Path) -> None:
    ran = run(tmp_path, Faults().flip_memory(1, 4), pipelines=2)
    assert ran.weights_sha256 == reference(JOB).weights_sha256
    (found,) = events(tmp_path, "corruption_unresolved")
    assert found["holders"] == [1, 3]
    assert not events(tmp_path, "quarantined")


def test_without_a_verified_checkpoint_the_run_starts_again(tmp_path: Path) -> None:
    ran = run(tmp_path, Faults().flip_memory(1, 0), pipelines=2)
    assert ran.weights_sha256 == reference(JOB).weights_sha256
    assert ran.summary["samples"] == ran.summary["samples_expected"]


def test_a_run_that_cannot_return_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holders of layers? .* differ after step .*faulty.*resume from a verified one"):
        run(tmp_path, Faults().flip_memory(1, 1), pipelines=2, strategy="none")


def test_a_majority_needs_two_that_agree_and_more_than_half() -> None:
    same, other, third = {0: "a"}, {0: "b"}, {0: "c"}
    assert compare_holders({0: same, 1: same}, 1).is_verified
    assert compare_holders({0: same, 1: same, 2: other}, 1).faulty_workers == (2,)
    assert compare_holders({0: same, 1: other}, 1).faulty_workers == ()
    assert compare_holders({0: same, 1: same, 2: other, 3: other}, 1).faulty_workers == ()
    assert compare_holders({0: same, 1: other, 2: third}, 1).faulty_workers == ()
    assert compare_holders({0: same}, 1).uncompared_layers == (0,)


def test_a_replay_contradicts_only_the_holder_that_was_wrong() -> None:
    truth = {0: {0: "a"}, 1: {0: "a"}}
    assert contradicted_by_replay({0: {0: "a"}, 1: {0: "b"}}, truth, [0]) == (1,)
    assert contradicted_by_replay({0: {0: "c"}, 1: {0: "b"}}, truth, [0]) == ()
