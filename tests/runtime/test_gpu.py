"""On a CUDA device every strategy trains the same through a loss as without one. `pytest -m gpu` runs these tests."""

from __future__ import annotations

from collections.abc import Callable
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


@pytest.mark.parametrize("strategy", ["reroute", "shadow", "shadow-lazy", "migrate", "templates"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_loss_changes_no_bit(strategy: str, schedule: str, tmp_path: Path) -> None:
    undisturbed = simulate(on_gpu(), pipelines=2, stages=3, schedule=schedule)
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
    assert disturbed.state_sha256 == undisturbed.state_sha256


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
    undisturbed = culm.train(job, pipelines=2, stages=2)
    disturbed = culm.train(job, pipelines=2, stages=2, strategy=strategy, kills=["node=1 step=1"])
    assert disturbed.preemptions == 1
    assert disturbed.state_sha256 == undisturbed.state_sha256
