"""Kill a node between the launch of an action on its device and the completion: the result must be the same.

Devices are simulated: work completes later, at times drawn from a seed, so that every halt finds actions under way on
the survivors, too. All moments of 2 x 2 and of 2 x 3 are covered, each schedule and strategy runs a part of them; with
EVERY_MOMENT=1 in the environment each runs all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cached_runs import cached_setup, reference_result
from tests.testing.test_kill_at_every_action import STEP, moments, prepared_setup, sweep_job
from torch import Tensor

from culm.cluster.run_setup import RunSetup
from culm.device.device_copies import DeviceCopies
from culm.device.simulated_streams import (
    SimulatedDevice,
    SimulatedDeviceFault,
    SimulatedStreams,
    SimulatedTimes,
)
from culm.errors import DeviceFailed
from culm.runtime import worker
from culm.runtime.compute import grad_accumulator
from culm.runtime.compute.off_loaded_tape import OffLoadedTape
from culm.runtime.executor import Executor
from culm.runtime.messages import FailureReport
from culm.runtime.optimizer_step import OptimizerStep
from culm.runtime.train_loop import TrainLoop
from culm.runtime.worker_reports import build_failure_report
from culm.runtime.worker_state import WorkerState
from culm.schedule import Action, Kind
from culm.testing import Faults
from culm.testing.simulated_cluster import SimulatedRun
from culm.testing.survival_check import run_and_compare
from culm.transport.collectives.simulated_group import SimulatedGroup

CASES = [(strategy, schedule) for strategy in ("reroute", "shadow") for schedule in ("1f1b", "zb")]
SMALL_POOL = 4096
"""Bytes: each output is evicted as soon as it was sent."""


@pytest.fixture(autouse=True)
def _checks_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact sums are checked as on a GPU: on the device, and read once per step."""
    monkeypatch.setattr(grad_accumulator, "defers_checks", lambda device: True)


@pytest.fixture
def halts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each halt of a worker: whether its device was busy. Checks that it is idle when the worker reports."""
    busy: list[bool] = []
    drain, inventory = TrainLoop.drain, WorkerState.inventory

    async def noted_drain(self: TrainLoop) -> None:
        busy.append(not _is_idle(self._state))
        await drain(self)

    def checked_inventory(self: WorkerState) -> object:
        assert _is_idle(self), "the device still works when the inventory is reported"
        return inventory(self)

    monkeypatch.setattr(TrainLoop, "drain", noted_drain)
    monkeypatch.setattr(WorkerState, "inventory", checked_inventory)
    return busy


def _is_idle(state: WorkerState) -> bool:
    assert isinstance(state.copies.streams, SimulatedStreams)
    return state.copies.streams.is_idle


def run(setup: RunSetup, faults: Faults, device: SimulatedDevice, *, exact: bool = True) -> SimulatedRun:
    job = sweep_job(exact)
    found = run_and_compare(job, setup, faults, device.seed, reference_result(job), device=device)
    assert not found.faults_not_reached(faults)
    return found


def launches_and_completions(setup: RunSetup, node: int) -> Iterator[str]:
    """The moments of a node: after the launch of an action and, where other moments follow, after its completion."""
    for at in moments(setup, node):
        if at != "commit" and Action.parse(at.removesuffix("+")).kind not in (Kind.R, Kind.S):
            yield f"launch {at}"
        yield at


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 2), (2, 3)])
@pytest.mark.parametrize(("strategy", "schedule"), CASES)
def test_a_node_killed_between_launch_and_completion_changes_no_bit(
    strategy: str, schedule: str, pipelines: int, stages: int, halts: list[bool]
) -> None:
    setup = prepared_setup(pipelines, stages, schedule, strategy, True)
    cases = [(node, at) for node in range(pipelines * stages) for at in launches_and_completions(setup, node)]
    every = 1 if os.environ.get("EVERY_MOMENT") else 2 * len(CASES)
    for number, (node, at) in list(enumerate(cases))[CASES.index((strategy, schedule)) % every :: every]:
        run(setup, Faults().kill(node, at=at, step=STEP), SimulatedDevice(seed=number))
    assert sum(halts) > len(halts) / 10, "the halts of this sweep should find work under way"


def test_sums_that_are_not_exact_survive_too(halts: list[bool]) -> None:
    setup = prepared_setup(2, 2, "zb", "reroute", False)
    for node, at in ((0, "launch 0F1"), (1, "launch 1W0"), (3, "launch 1I2")):
        run(setup, Faults().kill(node, at=at, step=0), SimulatedDevice(seed=node), exact=False)
    assert any(halts)


@pytest.mark.parametrize(("pipelines", "strategy"), [(2, "reroute"), (2, "shadow"), (1, "shadow")])
def test_the_next_weights_do_not_wait_for_the_copies_of_sums_that_are_kept(
    pipelines: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[bool] = []
    step_replica = OptimizerStep._step_replica

    def noted(self: OptimizerStep, step: int, *arguments: Any) -> None:
        kept = self._state.open_steps[step].reduced_gradients.values()
        under_way.append(any(not each.event.is_complete() for each in kept))
        step_replica(self, step, *arguments)

    monkeypatch.setattr(OptimizerStep, "_step_replica", noted)
    setup = msgspec.structs.replace(prepared_setup(pipelines, 2, "1f1b", strategy, True), reduce="nccl")
    device = SimulatedDevice(times=SimulatedTimes(compute=(0.001, 0.002), copy=(0.2, 0.3)))
    run(setup, Faults(), device)
    assert any(under_way)


@pytest.mark.parametrize(("strategy", "schedule"), CASES)
def test_sums_on_the_devices_survive_a_node_killed_around_them(
    strategy: str, schedule: str, halts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device: list[bool] = []
    all_reduce = SimulatedGroup.all_reduce

    async def noted(self: SimulatedGroup, *tensors: Tensor) -> None:
        on_device.append(self.on_device)
        await all_reduce(self, *tensors)

    monkeypatch.setattr(SimulatedGroup, "all_reduce", noted)
    setup = msgspec.structs.replace(prepared_setup(2, 2, schedule, strategy, True), reduce="nccl")
    last = "W" if schedule == "zb" else "B"
    cases = [(0, "0R"), (1, "1R"), (2, "0S"), (3, "1S+"), (1, f"launch 1{last}1"), (2, f"launch 0{last}2")]
    for number, (node, at) in enumerate(cases[CASES.index((strategy, schedule)) % 2 :: 2]):
        run(setup, Faults().kill(node, at=at, step=STEP), SimulatedDevice(seed=number))
    assert any(halts)
    assert on_device
    assert all(on_device)


@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_outputs_evicted_for_lack_of_memory_are_computed_again(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    evicted = 0
    evict = WorkerState.evict_oldest

    def counted(self: WorkerState, first_step: int) -> bool:
        nonlocal evicted
        found = evict(self, first_step)
        evicted += found
        return found

    monkeypatch.setattr(WorkerState, "evict_oldest", counted)
    setup = prepared_setup(2, 2, "1f1b", strategy, True)
    for number, at in enumerate(("launch 0F1", "0B1", "0R")):
        run(setup, Faults().kill(0, at=at, step=STEP), SimulatedDevice(seed=number, slab_bytes=SMALL_POOL))
    assert evicted


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many tapes of shadows left the device, and how many came back: from the host, and while they were copied."""
    counts = {"left": 0, "from the host": 0, "during the copy": 0}
    leave_device, bring_back = OffLoadedTape.leave_device, OffLoadedTape.bring_back

    def noted_leave(self: OffLoadedTape) -> None:
        counts["left"] += 1
        leave_device(self)

    def noted_bring_back(self: OffLoadedTape) -> None:
        if self.is_on_host:
            still_here = any(source() is not None for source in self._sources)
            counts["during the copy" if still_here else "from the host"] += 1
        bring_back(self)

    monkeypatch.setattr(OffLoadedTape, "leave_device", noted_leave)
    monkeypatch.setattr(OffLoadedTape, "bring_back", noted_bring_back)
    return counts


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize(("pipelines", "stages"), [(1, 3), (2, 3)])
def test_a_loss_at_any_moment_finds_what_shadows_have_off_loaded(
    pipelines: int, stages: int, schedule: str, tapes: dict[str, int], halts: list[bool]
) -> None:
    """The copies of this device are slow, so that many halts find some of them under way."""
    setup = prepared_setup(pipelines, stages, schedule, "shadow", True)
    nodes = range(stages)
    cases = [(node, at) for node in nodes for at in launches_and_completions(setup, node)]
    every = 1 if os.environ.get("EVERY_MOMENT") else 6
    for number, (node, at) in list(enumerate(cases))[(pipelines + len(schedule)) % every :: every]:
        slow = SimulatedTimes(copy=(0.001, 0.2)) if number % 2 else None
        device = SimulatedDevice(seed=number, times=slow)
        run(setup, Faults().kill(node, at=at, step=STEP), device)
        assert all(copies.pool.lent_bytes == 0 for copies in device.opened if _has_ended_well(copies))
    assert any(halts)
    assert tapes["left"] > 10
    assert tapes["from the host"] + tapes["during the copy"] > 0


def _has_ended_well(copies: DeviceCopies) -> bool:
    """Whether everything that was queued is done: the device is not that of a killed node."""
    assert isinstance(copies.streams, SimulatedStreams)
    return copies.streams.is_idle


def test_without_page_locked_memory_shadows_run_fewer_forwards_in_advance(
    tapes: dict[str, int], tmp_path: Path
) -> None:
    setup = cached_setup(sweep_job(True), pipelines=2, stages=3, strategy="shadow", out=str(tmp_path / "run"))
    found = run(setup, Faults().kill(1, at="1B1", step=STEP), SimulatedDevice(seed=1, slab_bytes=SMALL_POOL))
    assert found.summary["preemptions"] == 1
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    full = [event for event in events if event["kind"] == "shadow_memory_full"]
    assert full
    assert all(event["needed"] > 0 and event["cap"] == SMALL_POOL for event in full)
    assert tapes["left"] == 0


@pytest.mark.parametrize("strategy", ["none", "checkpoint", "drop", "shadow-lazy", "migrate", "templates"])
def test_other_strategies_train_the_same_on_a_device(strategy: str, tmp_path: Path) -> None:
    setup = cached_setup(sweep_job(True), pipelines=2, stages=2, strategy=strategy, out=str(tmp_path / "run"))
    run(setup, Faults(), SimulatedDevice(seed=7))


def test_the_trace_shows_copies_beside_the_computation(tmp_path: Path) -> None:
    setup = cached_setup(sweep_job(True), pipelines=2, stages=2, strategy="reroute", out=str(tmp_path / "run"))
    run(setup, Faults(), SimulatedDevice(seed=5))
    spans = [event for event in json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"] if "dur" in event]
    copies = [span for span in spans if span["cat"] == "copy"]
    actions = [span for span in spans if span["cat"] in "FIBW"]
    assert {span["name"].removeprefix("copy ") for span in copies} <= {span["name"] for span in actions}
    assert all(span["dur"] >= 0 for span in spans)
    beside = [
        (copy["name"], action["name"])
        for copy in copies
        for action in actions
        if copy["tid"] - action["tid"] == 1_000_000
        and max(copy["ts"], action["ts"]) < min(copy["ts"] + copy["dur"], action["ts"] + action["dur"])
    ]
    assert beside, "some output is copied while the next action is computed"


def test_a_device_that_reports_an_error_loses_its_node_and_not_the_run() -> None:
    device = SimulatedDevice(seed=1, faults={2: SimulatedDeviceFault(at=0.9)})
    found = run(prepared_setup(2, 2, "1f1b", "reroute", True), Faults(), device)
    assert found.summary["preemptions"] == 1
    assert "the simulated device reported an error" in str(found.history)


@pytest.mark.parametrize(
    ("error", "is_reported"),
    [("an illegal memory access was encountered", False), ("device-side assert triggered", True)],
)
def test_an_exception_of_a_failed_device_loses_its_node_at_once(
    error: str, is_reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where discarding what the action has left would fail. An assertion in a kernel may be the job's fault."""
    calls = []

    def failed(self: DeviceCopies) -> DeviceFailed | None:
        calls.append(self)
        return DeviceFailed(f"the device reported an error: CUDA error: {error}") if len(calls) == 1 else None

    def cannot_discard(self: Executor) -> None:
        raise RuntimeError(f"CUDA error: {error}")

    def noted_report(*arguments: Any) -> FailureReport:
        reports.append(build_failure_report(*arguments))
        return reports[-1]

    reports: list[FailureReport] = []
    monkeypatch.setattr(worker, "build_failure_report", noted_report)
    monkeypatch.setattr(DeviceCopies, "find_failure", failed)
    monkeypatch.setattr(Executor, "discard_failed_action", cannot_discard)
    setup = prepared_setup(2, 2, "1f1b", "reroute", True)
    found = run(setup, Faults().fail(1, at="1F1", step=STEP), SimulatedDevice(seed=2))
    assert found.summary["preemptions"] == 1
    assert bool(reports) == is_reported
    assert error in str(found.history)


def test_a_device_that_hangs_loses_its_node_and_not_the_run() -> None:
    """The leader notices that no action completes: launched actions do not count as progress."""
    device = SimulatedDevice(seed=1, faults={2: SimulatedDeviceFault(at=0.9, hangs=True)})
    found = run(prepared_setup(2, 2, "1f1b", "reroute", True), Faults(), device)
    assert found.summary["preemptions"] == 1


def test_a_notice_hands_over_what_the_device_has_computed() -> None:
    setup = prepared_setup(2, 2, "1f1b", "reroute", True)
    found = run(setup, Faults().warn(1, at="1B0", step=STEP, seconds=30), SimulatedDevice(seed=3))
    assert [each["redone_actions"] for each in found.summary["recoveries"]] == [0]


def test_at_most_two_actions_are_launched_beyond_what_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    from culm.runtime.launched_actions import MAX_LAUNCHED, LaunchedAction, LaunchedActions

    depths: list[int] = []
    add = LaunchedActions.add

    def counted(self: LaunchedActions, action: LaunchedAction) -> None:
        add(self, action)
        depths.append(len(self._launched))

    monkeypatch.setattr(LaunchedActions, "add", counted)
    run(prepared_setup(2, 2, "zb", "reroute", True), Faults(), SimulatedDevice(seed=1))
    assert max(depths) == MAX_LAUNCHED == 2


def test_an_exception_with_work_under_way_is_repeated_elsewhere(halts: list[bool]) -> None:
    setup = prepared_setup(2, 2, "1f1b", "reroute", True)
    for number, at in enumerate(("1F1", "1B0")):
        run(setup, Faults().fail(1, at=at, step=STEP), SimulatedDevice(seed=number))
    assert any(halts)
