"""On a CUDA device every strategy trains the same through a loss as without one. `pytest -m gpu` runs these tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.sample_jobs import everything, job_with

import culm
from culm.job import Job
from culm.testing import Faults, simulate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain": lambda params: torch.optim.AdamW(params, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "capturable": lambda params: torch.optim.AdamW(params, capturable=True),
}


def on_gpu(**fields: Any) -> Job:
    return job_with(everything, device="cuda", exact=True, steps=4, **fields)


@pytest.fixture(autouse=True)
def _usual_algorithms() -> Iterator[None]:
    """Exact runs in this process choose deterministic algorithms for all that follow."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy", "migrate", "templates"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_loss_changes_no_bit(strategy: str, schedule: str, tmp_path: Path) -> None:
    failure_free = simulate(on_gpu(), pipelines=2, stages=3, schedule=schedule)
    disturbed = simulate(
        on_gpu(),
        pipelines=2,
        stages=3,
        schedule=schedule,
        strategy=strategy,
        faults=Faults().kill(node=1, step=1),
        out=str(tmp_path / "run"),
    )
    assert disturbed.summary["preemptions"] == 1
    assert disturbed.state_sha256 == failure_free.state_sha256


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_optimizer_state_that_moves_stays_usable(optimizer: str, strategy: str) -> None:
    job = on_gpu(optimizer=OPTIMIZERS[optimizer])
    faults = Faults().kill(node=1, step=1).join(6, step=2)
    disturbed = simulate(job, pipelines=2, stages=3, strategy=strategy, faults=faults)
    assert disturbed.state_sha256 == simulate(job, pipelines=2, stages=3).state_sha256


@pytest.mark.real
@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_real_processes_survive_a_killed_node(strategy: str) -> None:
    job = on_gpu(optimizer=OPTIMIZERS["fused"])
    failure_free = culm.train(job, pipelines=2, stages=2)
    disturbed = culm.train(job, pipelines=2, stages=2, strategy=strategy, kills=["node=1 step=1"])
    assert disturbed.preemptions == 1
    assert disturbed.state_sha256 == failure_free.state_sha256


def reduce_libraries(folder: Path) -> list[tuple[str, str]]:
    """What summed gradients in each epoch of a run, and why it was not NCCL."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    found = [(event.get("reduce") or "", event.get("why") or "") for event in events if "reduce" in event]
    return list(dict.fromkeys(each for each in found if each[0]))


@pytest.mark.real
@pytest.mark.parametrize("exact", [True, False])
def test_nccl_sums_gradients_of_processes_that_share_a_gpu(exact: bool, tmp_path: Path) -> None:
    job = job_with(on_gpu(), exact=exact)
    over_nccl = culm.train(job, pipelines=2, stages=2, reduce="nccl", out=str(tmp_path / "nccl"))
    assert reduce_libraries(tmp_path / "nccl") == [("nccl", "")]
    over_gloo = culm.train(job, pipelines=2, stages=2, reduce="gloo", out=str(tmp_path / "gloo"))
    assert reduce_libraries(tmp_path / "gloo") == [("gloo", "")]
    assert over_nccl.state_sha256 == over_gloo.state_sha256, "two terms have the same sum in any order"


@pytest.mark.real
@pytest.mark.parametrize("at", ["0R", "1B3", "1F2"])
@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_nccl_groups_are_built_again_after_a_loss(strategy: str, at: str, tmp_path: Path) -> None:
    """Three pipelines, so that two workers still sum together afterwards."""
    job = job_with(on_gpu(), steps=6)
    failure_free = culm.train(job, pipelines=3, stages=2)
    node = 2 if at == "0R" else 3
    run = culm.train(
        job,
        pipelines=3,
        stages=2,
        strategy=strategy,
        reduce="nccl",
        kills=[f"node={node} step=2 at={at}"],
        out=str(tmp_path / "run"),
    )
    assert run.preemptions == 1
    assert run.state_sha256 == failure_free.state_sha256
    assert reduce_libraries(tmp_path / "run") == [("nccl", "")]
