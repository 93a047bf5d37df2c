from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from benchmarks.resilience.compute_job import COMPUTE_SPEC, ComputeJob
from benchmarks.resilience.detection_latency import measure_detection_ms, seconds_to_new_epoch, summarize_latencies
from benchmarks.resilience.emulated_job import EmulatedJob, SleepingLinear
from benchmarks.resilience.parallel_runs import ParallelRuns
from benchmarks.resilience.preemption_goodput import (
    FinishedRun,
    PreemptionScenario,
    run_failure_free,
    run_with_preemptions,
)
from benchmarks.resilience.real_pause import HIT_STEP, STEPS, pause_of_run
from benchmarks.resilience.resilience_result import ResilienceResult, StrategyCost, render_table
from benchmarks.resilience.resilience_settings import QUICK, STRATEGIES, STRATEGY_ORDER
from benchmarks.resilience.strategy_overhead import STRATEGIES as MEASURED
from benchmarks.resilience.strategy_overhead import measure_overhead, overhead_shape
from rich.console import Console

from benchmarks.resilience import detection_latency, real_pause, slow_storage
from culm.checkpoint import Storage
from culm.config import RunConfig
from culm.providers.local_provider import ForkServerClient, local_run
from culm.strategies import known_names
from culm.testing import reference
from culm.training import pickle_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.common.gpt_job import GPTSpec, StageCut

STEP_S = {"none": 0.1, "reroute": 0.1, "shadow-lazy": 0.105, "shadow": 0.11}
SCENE = PreemptionScenario(
    pipelines=2,
    stages=2,
    micro_batches_per_pipeline=2,
    action_s=0.004,
    steps=12,
    steps_between_losses=6.0,
    replaced_after=3.0,
)


class Fake:
    """A factory of runs whose steps take the time of their strategy."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.rounds: list[tuple[float, tuple[int, ...]]] = []
        self.open = 0

    def __call__(self, spec: GPTSpec, cut: StageCut, schedule: str, **more: Any) -> FakeRun:
        del spec, cut, schedule
        self.open += 1
        self.started.append(more["strategy"])
        return FakeRun(self, STEP_S[more["strategy"]])


class FakeRun:
    def __init__(self, factory: Fake, step_s: float) -> None:
        self.factory, self.step_s = factory, step_s
        self.cores: tuple[int, ...] = ()
        self.summary: dict[str, Any] = {}

    def run_round(self, steps: int) -> float:
        self.factory.rounds.append((self.step_s, self.cores))
        return steps * self.step_s

    def move_to_cores(self, cores: Sequence[int]) -> None:
        self.cores = tuple(cores)

    def close(self) -> None:
        self.factory.open -= 1
        self.summary = {"memory": {"kept_bytes": 4_000_000}, "bubble_share": 0.5}


@pytest.mark.parametrize("strategy", MEASURED)
def test_the_overhead_is_relative_to_a_step_with_none(strategy: str) -> None:
    result = measure_overhead(Fake(), QUICK.effort, strategy, 2, 2)
    assert result["overhead"] == pytest.approx(STEP_S[strategy] / STEP_S["none"] - 1)
    assert result["overhead_ci"] == pytest.approx([result["overhead"]] * 2)


def test_with_enough_cores_both_sides_run_at_the_same_time_and_swap_cores() -> None:
    fake = Fake()
    result = measure_overhead(
        fake, replace(QUICK.effort, concurrent_rounds=8, starts=2), "shadow", 1, 2, cores=range(5)
    )
    assert result["together"]
    assert result["rounds"] == 8
    assert result["overhead"] == pytest.approx(STEP_S["shadow"] / STEP_S["none"] - 1)
    moved = [where for step_s, where in fake.rounds if where and step_s == STEP_S["none"]]
    assert set(moved) == {(0, 1), (2, 3)}
    assert all(before != after for before, after in pairwise(moved[:5]))
    assert not measure_overhead(fake, QUICK.effort, "shadow", 1, 2, cores=range(3))["together"]


def test_sides_alternate_in_starting_first_and_all_are_closed() -> None:
    fake = Fake()
    measure_overhead(fake, replace(QUICK.effort, rounds=4, starts=2), "reroute", 2, 1)
    assert fake.started == ["none", "reroute", "reroute", "none"]
    assert fake.open == 0


def test_there_is_a_core_for_each_worker_if_there_are_two() -> None:
    for cores in (2, 4, 8, 16):
        for name in MEASURED:
            pipelines, stages = overhead_shape(name, cores)
            assert pipelines * stages <= cores
            assert pipelines > 1 if name == "reroute" else stages > 1


def test_every_strategy_of_this_version_but_none_is_left_out() -> None:
    assert set(STRATEGIES) == set(known_names()) & set(STRATEGY_ORDER) == set(known_names())


def test_losses_have_their_interval_and_each_node_is_replaced() -> None:
    moves = SCENE.preemption_trace(0.5).changes
    removed = {move.node: move.t for move in moves if move.kind == "remove"}
    added = [move.t for move in moves if move.kind == "add"]
    assert [round(t / 0.5 / 6.0 - 0.5) for t in removed.values()] == list(range(len(removed)))
    assert added == pytest.approx([t + 1.5 for t in removed.values()])


def test_losses_hit_present_nodes_and_are_equal_for_all_strategies() -> None:
    losses = SCENE.preemption_trace(1.0)
    there = {event.node for event in losses.initial_nodes}
    for move in losses.changes:
        assert (move.node in there) == (move.kind == "remove")
        there ^= {move.node}
        assert SCENE.nodes - 1 <= len(there) <= SCENE.nodes
    assert losses == SCENE.preemption_trace(1.0) != replace(SCENE, seed=1).preemption_trace(1.0)


@pytest.mark.parametrize("lag", [0.0, 1.0], ids=["at its end", "with the next"])
def test_a_pause_is_the_delay_of_the_last_open_step(lag: float) -> None:
    failure_free = [step + lag for step in range(STEPS - 1)] + [float(STEPS - 1)]  # one second per step
    ended = [2 * t for t in failure_free[: HIT_STEP - 1]] + [2 * HIT_STEP + 3.0] * (
        STEPS - HIT_STEP + 1
    )  # half as fast
    held = pause_of_run(ended, failure_free, HIT_STEP, 0.5)
    assert (held.pause_s, held.step_s) == pytest.approx((3.0, 2.0))
    assert held.pause_steps == pytest.approx(1.5)
    assert not held.is_within_bound
    assert pause_of_run(ended, failure_free, HIT_STEP, 1.2).is_within_bound


def test_latency_ends_when_the_last_member_has_started_the_epoch_without_the_node() -> None:
    events = [
        {"t": 1.0, "kind": "epoch", "members": [0, 1, 2]},
        {"t": 1.1, "kind": "ready", "node": 0, "seconds": 0.0},
        {"t": 2.1, "kind": "epoch", "members": [0, 2]},
        {"t": 2.3, "kind": "ready", "node": 0, "seconds": 0.1},
        {"t": 2.4, "kind": "ready", "node": 2, "seconds": 0.3},
    ]
    assert seconds_to_new_epoch(events, 1, 2.0) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="without node 0"):
        seconds_to_new_epoch(events, 0, 2.0)


def test_latency_summary_of_no_value_and_of_one_value() -> None:
    assert summarize_latencies([]) == {"median": None, "p90": None, "max": None}
    assert summarize_latencies([3.0]) == {"median": 3.0, "p90": 3.0, "max": 3.0}


def test_the_sleep_of_layers_does_not_change_the_result() -> None:
    asleep, awake = (
        EmulatedJob(stages=2, micro_batches=2, action_s=s, steps=2, exact=True).build_job() for s in (0.001, 0.0)
    )
    assert reference(asleep).state_sha256 == reference(awake).state_sha256


def test_gradients_of_a_sleeping_layer_equal_those_without_sleep() -> None:
    layer = SleepingLinear(0.0)
    x = torch.ones(1, 8, requires_grad=True)
    layer(x).sum().backward()
    expected = torch.autograd.grad(torch.tanh(x @ layer.weight).sum(), (x, layer.weight))
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(layer.weight.grad, expected[1])


def test_slow_storage_round_trips_files_and_delays_only_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.resilience.slow_storage.time.sleep", slept.append)
    slow_storage.register_slow_storage()
    storage = Storage(slow_storage.slow_url(str(tmp_path), write_s=11, read_s=17))
    storage.write("step/a.safetensors", b"weights")
    storage.write("step/manifest.json", b"{}")
    assert storage.read("step/a.safetensors") == b"weights"
    assert storage.list("step") == ["a.safetensors", "manifest.json"]
    storage.delete("step")
    assert not storage.exists("step/manifest.json")
    assert slept == [11, 17]


def cost(**known: float) -> StrategyCost:
    fields = dict.fromkeys(StrategyCost.__annotations__)
    return {**fields, **known}  # type: ignore[typeddict-item]


def test_the_table_has_a_line_for_each_strategy() -> None:
    scenario = {"pipelines": 4, "stages": 4, "step_s": 2.0, "loss_every_steps": 10.0, "back_after_steps": 5.0}
    result = ResilienceResult(
        strategies={name: cost(vs_undisturbed=0.5) for name in STRATEGIES} | {"none": cost()},
        detect_ms={"median": 40.0, "p90": 50.0, "max": 60.0},
        compute="emulated",
        overhead_compute="real",
        scene=scenario,
        checkpoint={},
        grid=[],
        bamboo={"ratio": 3.8},
        real=None,
        integrity={"frames": {"share": 0.002, "ci": [0.001, 0.003], "rounds": 10}},
        lanes=2,
        kills={},
        cores=2,
        workers=16,
    )
    console = Console(file=io.StringIO(), width=120)
    console.print(render_table(result))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert all(name in shown for name in STRATEGIES)
    assert all(text in shown for text in ("50%", "emulated", "3.80 times", "40 ms", "frames 0.20%"))
    assert json.loads(json.dumps(result))["strategies"].keys() == set(STRATEGIES)


def test_the_json_has_the_documented_keys() -> None:
    promised = {"overhead", "overhead_ci", "vs_undisturbed", "vs_checkpoint", "bubble_share"}
    promised |= {"pause_steps", "pause_bound_steps", "pause_s"}
    assert StrategyCost.__annotations__.keys() >= promised
    assert ResilienceResult.__annotations__.keys() >= {"strategies", "detect_ms", "compute", "cores", "workers"}


@pytest.fixture(scope="module")
def fork_server(forked_programs: None) -> Any:
    with ForkServerClient() as made:
        yield made


@pytest.fixture(scope="module")
def failure_free(fork_server: ForkServerClient) -> FinishedRun:
    """A summary of a failure-free run."""
    return run_failure_free(SCENE, fork_server)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_under_the_same_losses_none_fails_and_reroute_continues(
    fork_server: ForkServerClient, failure_free: FinishedRun
) -> None:
    assert failure_free.goodput > 0
    scenario = replace(
        SCENE, steps_between_losses=float(SCENE.steps)
    )  # a busy machine must recover from one before the next
    assert run_with_preemptions(scenario, fork_server, "none", failure_free.step_s).goodput == 0
    ran = run_with_preemptions(scenario, fork_server, "reroute", failure_free.step_s)
    assert ran.goodput > 0
    assert ran.summary["preemptions"] >= 1
    assert (ran.summary["samples_lost"], ran.summary["samples_duplicated"]) == (0, 0)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_run_rolls_back_to_a_checkpoint_on_slow_storage(
    fork_server: ForkServerClient, failure_free: FinishedRun, tmp_path: Path
) -> None:
    scenario = replace(
        SCENE, steps_between_losses=2.0 * SCENE.steps
    )  # a busy machine has to write one between two losses
    out = slow_storage.slow_url(str(tmp_path), write_s=0.01, read_s=0.05)
    ran = run_with_preemptions(
        replace(scenario, steps=2 * scenario.steps),
        fork_server,
        "checkpoint",
        failure_free.step_s,
        out=out,
        checkpoint_every=2,
        replace_within=5.0,
    )
    assert "checkpoint" in {each["source"] for each in ran.summary["recoveries"]}
    assert list(tmp_path.glob("checkpoints/*"))


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_nodes_with_real_compute_can_use_slow_storage(fork_server: ForkServerClient, tmp_path: Path) -> None:
    work = ComputeJob(stages=2, micro_batches=2, steps=2, spec=replace(COMPUTE_SPEC, width=16, tokens=8))
    out = slow_storage.slow_url(str(tmp_path), write_s=0.01, read_s=0.01)
    asked = RunConfig(pipelines=1, stages=2, cuts=work.cuts, out=out, checkpoint_every=1)

    async def ran() -> dict[str, Any]:
        async with local_run(fork_server, pickle_job(work.build_job()), asked) as run:
            return dict((await run.wait_for_result()).summary or {})

    assert asyncio.run(ran())["steps"] == 2
    assert list(tmp_path.glob("checkpoints/*"))


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_killed_node_is_detected_and_its_pause_has_a_bound(
    fork_server: ForkServerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection_latency, "PIPELINES", 2)
    monkeypatch.setattr(real_pause, "PIPELINES", 1)  # a shadow needs only one pipeline
    (ms,) = measure_detection_ms(fork_server, 1)
    assert ms > 0
    with ParallelRuns(fork_server, 1) as lanes:
        (held,) = real_pause.measure_real_pauses(lanes, "shadow", kills=1, action_s=0.004)
    assert held.step_s > 0
    assert held.bound_steps >= 0
