"""Real processes, sockets and Gloo with workers that compute on emulated devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.device.emulated_device_job import make_job

import culm
from culm.testing import reference


@pytest.mark.real
@pytest.mark.parametrize("strategy", ["reroute", "shadow"])
def test_real_processes_survive_a_loss_with_work_under_way(
    strategy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = make_job()
    monkeypatch.setenv("EMULATED_DEVICE", str(tmp_path))
    run = culm.train(job, pipelines=2, stages=2, strategy=strategy, kills=["node=1 step=2 at=1F1"])
    locked = list(tmp_path.glob("locked by *"))
    assert len(list(tmp_path.iterdir())) - len(locked) >= 4, "every worker computed on an emulated device"
    assert len(locked) >= 4, "every worker received frames where their sender had them"
    assert run.preemptions == 1
    assert run.state_sha256 == reference(job).state_sha256
