"""An exception on one node does not end the run: another holder repeats the action. On two nodes it does."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cached_runs import run_with_faults
from tests.tiny_jobs import job as tiny_job
from tests.tiny_jobs import linear
from torch import Tensor, nn

from culm import Job
from culm.errors import CulmError, JobError, LayerFailed, NonFiniteLoss, UsageError
from culm.testing import Faults, SimulatedRun, simulate
from culm.testing.chaos import make_job

ECC = "uncorrectable ECC error"
TWO_BY_TWO: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "reroute"}
ACTIONS = ("0F0", "0F1", "0B0", "0B1", "0S", "1F0", "1F1", "1B0", "1B1", "1S")


@functools.cache
def job() -> Job:
    return make_job((), True, 4)


def holder(action: str) -> int:
    """A node of the first pipeline that runs an action."""
    return int(action[0])


def lost_nodes(run: SimulatedRun) -> list[Sequence[int]]:
    return [each["lost"] for each in run.summary["recoveries"]]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_node_that_raises_is_replaced_by_another_holder_and_no_bit_differs(action: str) -> None:
    node = holder(action)
    run = run_with_faults(job(), Faults().fail(node, at=action, step=2, error=ECC), **TWO_BY_TWO)
    assert lost_nodes(run) == [[node]]
    assert run.summary["preemptions"] == 1
    assert (run.summary["samples_lost"], run.summary["samples_duplicated"]) == (0, 0)


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy", "drop", "templates", "checkpoint", "migrate"])
def test_every_strategy_that_survives_losses_survives_an_exception(strategy: str, tmp_path: Any) -> None:
    request: dict[str, Any] = {
        "pipelines": 2,
        "stages": 2,
        "strategy": strategy,
        "out": str(tmp_path),
        "checkpoint_every": 1,
    }
    faults = Faults().fail(1, at="1B0", step=2, error=ECC)
    run = simulate(job(), faults=faults, **request) if strategy == "drop" else run_with_faults(job(), faults, **request)
    assert lost_nodes(run) == [[1]]


@pytest.mark.parametrize("step", [1, 3])
def test_an_exception_in_an_evaluation_is_repeated_by_another_holder(step: int) -> None:
    """Step 3 is the last one: there the run ends before the node is declared lost."""
    evaluated = make_job(("evaluation",), True, 4)
    run = run_with_faults(evaluated, Faults().fail(1, at="evaluate 1F0", step=step, error=ECC), **TWO_BY_TWO)
    assert lost_nodes(run) == [[1]]


def test_nodes_with_several_workers_are_replaced_as_a_whole() -> None:
    request = {**TWO_BY_TWO, "workers_per_node": 2}
    run = run_with_faults(job(), Faults().fail(1, at="1B2", step=2, error=ECC), **request)
    assert lost_nodes(run) == [[1]]


@pytest.mark.parametrize(("at", "nth"), [("inventory", 1), ("adopt", 2)])
def test_a_node_that_has_failed_may_get_a_notice_before_it_is_declared_lost(at: str, nth: int) -> None:
    faults = Faults().fail(1, at="1F1", step=2, error=ECC).warn(1, seconds=2.0, at=at, nth=nth)
    run = run_with_faults(job(), faults, **TWO_BY_TWO)
    assert (run.summary["samples_lost"], run.summary["samples_duplicated"]) == (0, 0)


def test_the_node_hands_over_its_sums_before_it_is_declared_lost() -> None:
    """Its micro-batches that are complete are not run again."""
    run = run_with_faults(job(), Faults().fail(1, at="1F1", step=2, error=ECC), **TWO_BY_TWO)
    killed = run_with_faults(job(), Faults().kill(1, at="1F1", step=2), **TWO_BY_TWO)
    assert run.summary["recoveries"][0]["redone_actions"] <= killed.summary["recoveries"][0]["redone_actions"]


def test_the_leader_of_the_run_may_be_the_node_that_raises() -> None:
    run = run_with_faults(job(), Faults().fail(0, at="0F1", step=2, error=ECC), **TWO_BY_TWO)
    assert lost_nodes(run) == [[0]]


def test_the_same_exception_on_a_second_node_ends_the_run_and_the_message_names_both() -> None:
    faults = Faults().fail(1, at="1F0", step=2, error=ECC).fail(3, at="1F2", step=3, error=ECC)
    with pytest.raises(LayerFailed, match=r"node 3: .*the same happened on node 1 in 1F0 of step 2") as raised:
        simulate(job(), faults=faults, **TWO_BY_TWO)
    assert ECC in str(raised.value)


def test_another_exception_on_a_second_node_is_another_fault() -> None:
    faults = Faults().fail(1, at="1F0", step=2, error=ECC).fail(2, at="0F2", step=3, error="bus error")
    run = run_with_faults(job(), faults, **TWO_BY_TWO)
    assert run.summary["preemptions"] == 2


def test_an_exception_before_the_first_commit_ends_the_run() -> None:
    with pytest.raises(LayerFailed, match=f"node 1: .*{ECC}"):
        simulate(job(), faults=Faults().fail(1, at="1F0", step=0, error=ECC), **TWO_BY_TWO)


def test_the_last_holder_without_a_checkpoint_repeats_what_raised_once() -> None:
    faults = Faults().kill(3, at="1F2", step=2).fail(1, at="1F3", step=2, error=ECC)
    run = run_with_faults(job(), faults, **TWO_BY_TWO)
    assert lost_nodes(run) == [[3]]
    with pytest.raises(LayerFailed, match=r"node 1 in 1W3 of step 2: .*repeated once; no other node holds its layers"):
        simulate(job(), faults=faults.fail(1, at="1B3", step=2, error=ECC), **TWO_BY_TWO)


def test_an_exception_on_the_last_holder_returns_to_a_checkpoint_once(tmp_path: Any) -> None:
    request = {**TWO_BY_TWO, "out": str(tmp_path / "a"), "checkpoint_every": 1}
    faults = Faults().kill(3, at="1F2", step=2).fail(1, at="1F3", step=2, error=ECC)
    run = run_with_faults(job(), faults, **request)
    assert run.summary["preemptions"] == 2
    again = faults.fail((0, 2), at="1F0", step=2, error=ECC)
    with pytest.raises(LayerFailed, match="the same happened"):
        simulate(job(), faults=again, **{**request, "out": str(tmp_path / "b")})


def test_a_strategy_without_live_copies_returns_to_a_checkpoint_once(tmp_path: Any) -> None:
    request: dict[str, Any] = {
        "pipelines": 2,
        "stages": 2,
        "strategy": "checkpoint",
        "out": str(tmp_path),
        "checkpoint_every": 1,
    }
    faults = Faults().fail(1, at="1F0", step=2, error=ECC).fail(3, at="1F0", step=2, error=ECC)
    with pytest.raises(LayerFailed, match="the same happened on node 1"):
        simulate(job(), faults=faults, **request)


class RaisesFrom(nn.Module):
    """A layer with a fault of its own: it raises for every micro-batch from its 9th call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 9:
            raise ValueError("this layer does not work")
        out: Tensor = self.linear(x)
        return out


def test_a_layer_that_raises_on_every_node_ends_the_run_as_the_fault_of_the_job() -> None:
    described = tiny_job(layers=[linear, linear, linear, RaisesFrom], steps=8, exact=True)
    with pytest.raises(LayerFailed, match=r"this layer does not work; the same happened on node [13] in 1F"):
        simulate(described, **TWO_BY_TWO)


@pytest.mark.parametrize("kind", [NonFiniteLoss, JobError])
def test_errors_of_the_job_end_the_run_at_once(kind: type[CulmError], monkeypatch: pytest.MonkeyPatch) -> None:
    from culm.testing.fault_runner import FaultRunner

    def raise_kind(_: FaultRunner, node: int, step: int, action: str) -> None:
        if (node, step, action) == (1, 2, "1B0"):
            raise kind("no")

    monkeypatch.setattr(FaultRunner, "raise_due_error", raise_kind)
    with pytest.raises(kind, match="node 1: no"):
        simulate(job(), **TWO_BY_TWO)


def test_the_first_lack_of_memory_empties_the_cache_and_repeats_the_action() -> None:
    run = run_with_faults(job(), Faults().fail(1, at="1B0", step=2, error="out of memory"), **TWO_BY_TWO)
    assert run.summary["preemptions"] == 0


def test_the_second_lack_of_memory_ends_the_run_with_stage_need_and_fix() -> None:
    faults = Faults().fail(1, at="1B0", step=2, error="out of memory").fail(1, at="1F1", step=3, error="out of memory")
    with pytest.raises(LayerFailed, match=r"node 1: .*does not suffice for stage 1.*use more stages"):
        simulate(job(), faults=faults, **TWO_BY_TWO)


def test_a_stand_in_without_memory_is_relieved_of_the_additional_stage() -> None:
    """In a 1 x 3 run with shadows, the worker that stands in for a lost one cannot hold two stages."""
    request: dict[str, Any] = {"pipelines": 2, "stages": 2, "strategy": "shadow"}
    faults = Faults().kill(1, at="1F1", step=1)
    for step in (2, 3):
        faults = faults.fail(0, at="1F0", step=step, error="out of memory")
    run = run_with_faults(job(), faults, **request)
    assert run.summary["preemptions"] == 1


def without_memory(killed: int, steps: Sequence[int], at: str = "1F0") -> Faults:
    """A node is lost, and node 1 runs out of memory in each of these later steps."""
    faults = Faults().kill(killed, step=1, nth=3)
    for step in steps:
        faults = faults.fail(1, at=at, step=step, error="out of memory")
    return faults


@functools.cache
def longer_job() -> Job:
    return make_job((), True, 4, steps=9)


def reasons(folder: Path, kind: str) -> list[str]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event["why"] for event in events if event["kind"] == kind]


def test_a_peer_without_memory_for_the_work_of_a_lost_worker_gets_less_of_it(tmp_path: Path) -> None:
    request = {**TWO_BY_TWO, "pipelines": 3, "out": str(tmp_path)}
    run = run_with_faults(longer_job(), without_memory(3, (2, 3)), **request)
    assert run.summary["preemptions"] == 1
    first, second = reasons(tmp_path, "out_of_memory")
    assert "its cache is emptied" in first
    assert "it gets fewer micro-batches" in second


@pytest.mark.parametrize("at", ["1F0", "1B1", "1F3"])
def test_a_peer_for_which_less_work_does_not_suffice_gets_a_smaller_stage(tmp_path: Path, at: str) -> None:
    """Three nodes are left: one pipeline of three stages takes the place of two of two."""
    request = {**TWO_BY_TWO, "out": str(tmp_path)}
    run = run_with_faults(longer_job(), without_memory(3, (2, 3, 4, 5), at), **request)
    assert run.summary["preemptions"] == 1
    assert "1 x 3 has stages that need less memory" in reasons(tmp_path, "out_of_memory")[-1]
    assert run.summary["samples"] == run.summary["samples_expected"]


def test_without_any_other_layout_a_lack_of_memory_ends_the_run_with_stage_need_and_fix() -> None:
    faults = Faults().kill(1, at="0F2", step=1)
    for step in range(2, 6):
        faults = faults.fail(0, at="0F0", step=step, error="out of memory")
    with pytest.raises(LayerFailed, match=r"node 0: .*does not suffice for stage 0.*use more stages"):
        simulate(longer_job(), faults=faults, **{**TWO_BY_TWO, "stages": 1})


def test_a_fault_has_a_moment_inside_an_action() -> None:
    for moment in ("commit", "1R", "1S+", None):
        with pytest.raises(UsageError):
            Faults().fail(1, at=moment)


def test_the_text_of_a_schedule_with_an_exception_is_its_code() -> None:
    faults = Faults().fail(1, at="1F0", step=2, error=ECC)
    assert eval(str(faults), {"Faults": Faults}) == faults


def test_a_half_done_update_is_no_source_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer raises after it has changed a weight on one node: others do not use its copy."""
    from culm.runtime.compute.model_state import ModelState

    real, calls = ModelState.step, []

    def step_and_raise(self: ModelState, step: int) -> None:
        calls.append(step)
        if calls.count(2) == 1 and step == 2:
            calls.append(step)
            next(iter(self.parameters().values())).data.add_(torch.ones(()))
            raise RuntimeError(ECC)
        real(self, step)

    monkeypatch.setattr(ModelState, "step", step_and_raise)
    assert run_with_faults(job(), Faults(), **TWO_BY_TWO).summary["preemptions"] == 1
