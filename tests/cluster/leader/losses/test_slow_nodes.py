"""A slow node costs about its own share of the throughput, and no bit of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.testing.small_job import job

from culm.config import RunConfig
from culm.device.simulated_streams import SimulatedDevice, SimulatedDeviceFault, SimulatedTimes
from culm.errors import UsageError
from culm.testing import Faults, SimulatedRun, simulate

SMALL: dict[str, Any] = {"steps": 60, "micro_batches": 16, "stages": 1}
SLOW = Faults().slow_node(3, factor=2.0, step=4)


def action_cost(node: int, step: int, action: str) -> float:
    """F and the backward that another stage waits for take a second each: the ratio of the estimated profile."""
    del node, step
    return 1.0 if action[0].isdigit() and action[1] in "FIB" else 0.0


def train(
    out: Path, faults: Faults, *, steps: int = 18, micro_batches: int = 32, **request: Any
) -> tuple[SimulatedRun, float, list[dict[str, Any]]]:
    """The run, the mean duration of its last four steps, and its events."""
    run = simulate(
        job(global_batch=2 * micro_batches, steps=steps),
        faults=faults,
        cost=action_cost,
        out=str(out),
        suspect_after=600.0,
        reconfigure="never",
        **{"pipelines": 4, "stages": 2, "strategy": "reroute", **request},
    )
    times = [json.loads(line)["t"] for line in (out / "steps.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return run, (times[-1] - times[-5]) / 4, events


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_a_node_at_half_speed_costs_about_its_own_share(tmp_path: Path, strategy: str) -> None:
    usual, usual_s, _ = train(tmp_path / "usual", Faults(), strategy=strategy)
    slow, slow_s, events = train(tmp_path / "slow", SLOW, strategy=strategy)
    _, kept_s, _ = train(tmp_path / "kept", SLOW, strategy=strategy, slow_factor=0)
    assert slow.weights_sha256 == usual.weights_sha256
    assert kept_s > 1.8 * usual_s
    assert slow_s < 1.35 * usual_s, "half of one of four workers of a stage is missing: 8/7 at best"
    (found,) = [event for event in events if event["kind"] == "slow_node"]
    assert (found["node"], found["factor"]) == (3, 2.0)
    assert "2.0 times as long" in found["why"]


def test_a_slow_device_is_found_though_actions_are_only_launched(tmp_path: Path) -> None:
    """The time of an action on a device is that of its completion: the launch takes no time."""
    times = SimulatedTimes(compute=(1.0, 1.0), copy=(0.01, 0.01))
    found, events = {}, {}
    for name, faults in (("usual", {}), ("slow", {3: SimulatedDeviceFault(at=30.0, slowdown=2.0)})):
        device = SimulatedDevice(times=times, faults=faults)
        found[name], _, events[name] = train(tmp_path / name, Faults(), device=device, **SMALL | {"steps": 20})
    slow = {name: [event for event in each if event["kind"] == "slow_node"] for name, each in events.items()}
    assert slow["usual"] == []
    assert [(event["node"], round(event["factor"])) for event in slow["slow"]] == [(3, 2)]
    assert found["slow"].weights_sha256 == found["usual"].weights_sha256


def test_a_node_that_recovers_gets_its_work_back(tmp_path: Path) -> None:
    _, usual_s, _ = train(tmp_path / "usual", Faults(), **SMALL)
    _, last_s, events = train(tmp_path / "slow", Faults().slow_node(3, factor=3.0, seconds=250.0), **SMALL)
    kinds = [event["kind"] for event in events if event["kind"].startswith("slow")]
    assert kinds == ["slow_node", "slow_nodes_over"]
    assert last_s == usual_s


def test_a_hiccup_changes_nothing(tmp_path: Path) -> None:
    _, _, events = train(tmp_path, Faults().slow_node(3, factor=20.0, step=6, seconds=100.0), **SMALL)
    assert [event for event in events if event["kind"].startswith("slow") or event.get("number", 1) > 1] == []


def test_a_slow_node_is_replaced_by_one_that_waits(tmp_path: Path) -> None:
    run, last_s, events = train(tmp_path / "slow", SLOW.join(0, at="0F0", step=6), **SMALL)
    usual, usual_s, _ = train(tmp_path / "usual", Faults(), **SMALL)
    assert [event["node"] for event in events if event["kind"] == "slow_node_replaced"] == [3]
    assert last_s == usual_s
    assert run.weights_sha256 == usual.weights_sha256


ONE_PIPELINE: dict[str, Any] = {"pipelines": 1, "stages": 4, "strategy": "shadow", "steps": 40, "micro_batches": 8}


def test_in_one_pipeline_a_slow_node_is_reported_and_keeps_its_work(tmp_path: Path) -> None:
    usual, _, quiet = train(tmp_path / "usual", Faults(), **ONE_PIPELINE)
    assert [event for event in quiet if event["kind"].startswith("slow")] == []
    faults = Faults().slow_node(2, factor=2.0, step=10, seconds=700.0)
    run, _, events = train(tmp_path / "slow", faults, **ONE_PIPELINE)
    assert [event["kind"] for event in events if event["kind"].startswith("slow")] == [
        "slow_node_stays",
        "slow_nodes_over",
    ]
    (found,) = [event for event in events if event["kind"] == "slow_node_stays"]
    assert (found["node"], found["factor"]) == (2, 2.0)
    assert max(event.get("number", 1) for event in events if event["kind"] == "epoch") == 1
    assert run.weights_sha256 == usual.weights_sha256


def test_in_one_pipeline_a_slow_node_is_replaced_by_one_that_waits(tmp_path: Path) -> None:
    usual, usual_s, _ = train(tmp_path / "usual", Faults(), **ONE_PIPELINE)
    slow = Faults().slow_node(2, factor=2.0, step=10).join(0, at="0F0", step=12)
    run, last_s, events = train(tmp_path / "slow", slow, **ONE_PIPELINE)
    assert [event["node"] for event in events if event["kind"] == "slow_node_replaced"] == [2]
    assert last_s < 1.2 * usual_s
    assert run.weights_sha256 == usual.weights_sha256


def test_a_loss_while_a_node_is_slow_is_recovered(tmp_path: Path) -> None:
    usual, _, _ = train(tmp_path / "usual", Faults())
    run, _, _ = train(tmp_path / "slow", SLOW.kill(5, at="1F20", step=15))
    assert run.weights_sha256 == usual.weights_sha256
    assert run.summary["preemptions"] == 1


def test_a_factor_within_the_noise_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--slow-factor is 1\.01"):
        RunConfig(slow_factor=1.01)
