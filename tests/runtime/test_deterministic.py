"""`exact` on a GPU: deterministic kernels only, and operations without one are named before the run. Here the CPU
stands for a GPU: it, too, has operations without a deterministic implementation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.tiny_jobs import job, linear
from torch import Tensor, nn

from culm.cluster import prepare_run as prepare_run_module
from culm.cluster.leader.member_registry import MemberRegistry
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.errors import JobError
from culm.runtime.compute import deterministic, device
from culm.runtime.compute.deterministic import check_determinism, exact_algorithms, use_exact_algorithms
from culm.testing import simulate

CPU = torch.device("cpu")


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU counts as a device that chooses kernels."""
    for module in (deterministic, prepare_run_module):
        monkeypatch.setattr(module, "chooses_kernels", lambda device: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with exact_algorithms(job(), CPU):  # restores everything
        yield


class Puts(nn.Module):
    """Its forward has no deterministic implementation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).put_(torch.tensor([0]), torch.ones(1)) + values * self.weight


class _PutsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient).put_(torch.tensor([0]), torch.ones(1))


class PutsInBackward(nn.Module):
    """Its backward has no deterministic implementation."""

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = _PutsBackward.apply(values)  # type: ignore[no-untyped-call]
        return found


def puts_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() + torch.zeros(3).put_(torch.tensor([0]), torch.ones(1)).sum()


@pytest.mark.usefixtures("cpu_as_gpu")
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layers": [linear, Puts, linear]}, r"layer 1 \(Puts\)"),
        ({"layers": [linear, PutsInBackward, linear]}, r"layer 1 \(PutsInBackward\)"),
        ({"layers": [linear] * 2, "loss": puts_loss}, "the loss"),
    ],
    ids=["forward", "backward", "loss"],
)
def test_an_operation_without_a_deterministic_implementation_is_named_before_the_run(
    changes: dict[str, Any], part: str
) -> None:
    made = job(exact=True, **changes)
    with pytest.raises(JobError, match=f"^{part} uses put_, which has no deterministic implementation"):
        prepare_run(made, RunConfig(strategy="none"))
    assert not torch.are_deterministic_algorithms_enabled(), "only the check turns it on in this process"


@pytest.mark.usefixtures("cpu_as_gpu")
def test_other_jobs_pass_the_check_and_jobs_without_exact_are_not_checked() -> None:
    check_determinism(job(layers=[linear] * 3, exact=True), CPU)
    check_determinism(job(layers=[linear] * 3, exact=True, precision="bf16"), CPU)
    prepare_run(job(layers=[linear, Puts, linear]), RunConfig(strategy="none"))


@pytest.mark.usefixtures("cpu_as_gpu")
def test_workers_of_an_exact_run_use_deterministic_algorithms() -> None:
    simulate(job(layers=[linear] * 2, steps=1, exact=True), stages=2, strategy="none")
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("cpu_as_gpu")
def test_a_configuration_of_cublas_that_is_deterministic_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, used in ((":16:8", ":16:8"), (":0:0", ":4096:8")):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given)
        use_exact_algorithms(job(exact=True), CPU)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == used


def test_nothing_changes_on_a_cpu_and_without_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    use_exact_algorithms(job(exact=True), CPU)
    monkeypatch.setattr(deterministic, "chooses_kernels", lambda device: True)
    use_exact_algorithms(job(), CPU)
    assert not torch.are_deterministic_algorithms_enabled()


GPU: dict[str, Any] = {"name": "H200", "multi_processor_count": 132}


@pytest.mark.parametrize(
    "other",
    [
        {"name": "H100"},
        {"multi_processor_count": 14},
        {"cuda": "13.0"},
        {"cudnn": 92000},
        {"driver": "580.10.1"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_nodes_of_another_gpu_slice_or_version_are_refused(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fingerprint_of(facts: dict[str, Any]) -> str:
        (tmp_path / "version").write_text(f"NVRM version: NVIDIA x86_64 Kernel Module  {facts['driver']}  Thu\n")
        monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
        monkeypatch.setattr(device, "select_device", lambda job: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**facts))
        monkeypatch.setattr(torch.version, "cuda", facts["cuda"])
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: facts["cudnn"])
        return device.fingerprint(job(exact=True))

    usual = {**GPU, "cuda": "12.8", "cudnn": 91002, "driver": "570.86.15"}
    mine, theirs = fingerprint_of(usual), fingerprint_of({**usual, **other})
    assert mine == fingerprint_of(usual)
    assert mine.partition("H200")[1] and "132 multiprocessors" in mine
    members = SimpleNamespace(nodes={0: SimpleNamespace(fingerprint=mine)})
    difference = MemberRegistry.fingerprint_difference(members, SimpleNamespace(fingerprint=theirs))  # type: ignore[arg-type]
    assert difference is not None
    assert mine in difference
    assert theirs in difference
