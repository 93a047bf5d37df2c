"""Bits that flip in frames on their way: found, sent again, counted, and without an effect on what is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.testing import Faults, reference, simulate

JOB = job(exact=True, steps=4)


@pytest.mark.parametrize("strategy", ["none", "reroute", "shadow"])
def test_a_flipped_bit_in_a_frame_changes_nothing(strategy: str, tmp_path: Path) -> None:
    faults = Faults().flip_frame(0, 1, nth=2).flip_frame(1, 0, nth=3)
    shape: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": strategy}
    ran = simulate(JOB, faults=faults, out=str(tmp_path), **shape)
    assert not ran.faults_not_reached(faults)
    assert ran.weights_sha256 == reference(JOB).weights_sha256
    assert ran.summary["corruptions"] == 2
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    found = [(event["node"], event["source"]) for event in events if event["kind"] == "corruption"]
    assert sorted(found) == [(0, 1), (1, 0)]


def test_a_flipped_bit_in_moved_state_changes_nothing() -> None:
    """Node 4 replaces node 3 and gets a copy of its layers, of which a bit flips."""
    faults = Faults().kill(3, at="1R", step=1).join(0, step=1).flip_frame(None, 4, nth=1)
    long = job(exact=True, steps=8)
    ran = simulate(long, faults=faults, pipelines=2, stages=2, strategy="reroute")
    assert not ran.faults_not_reached(faults)
    assert (ran.weights_sha256, ran.summary["corruptions"]) == (reference(long).weights_sha256, 1)
