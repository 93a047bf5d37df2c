"""The device of each worker of a node. The GPUs are simulated."""

from __future__ import annotations

import errno

import pytest
import torch
from tests.tiny_jobs import job

from culm.errors import JobError
from culm.runtime.compute.device import activate_device, is_out_of_memory, select_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_each_worker_of_a_node_uses_a_gpu_of_its_own(device: str) -> None:
    assert [str(select_device(job(device=device), index)) for index in range(2)] == ["cuda", "cuda:1"]


@pytest.mark.usefixtures("two_gpus")
def test_a_worker_without_a_gpu_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        JobError, match="worker 2 of a node needs GPU 2, and the node has 2 GPUs: use --workers-per-node 2"
    ):
        select_device(job(device="cuda"), 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_workers_share_a_device_that_the_job_names(device: str) -> None:
    assert {str(select_device(job(device=device), index)) for index in range(4)} == {device}


def test_only_a_numbered_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    for name in ("cpu", "cuda", "cuda:1"):
        activate_device(torch.device(name))
    assert made_current == [torch.device("cuda:1")]


def test_lack_of_memory_is_recognized_whatever_allocates() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(1 << 50, dtype=torch.uint8)  # more than an address space
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    system = OSError(errno.ENOMEM, "Cannot allocate memory")
    assert all(map(is_out_of_memory, [host.value, cublas, system, MemoryError(), torch.OutOfMemoryError("full")]))
    ecc = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    assert not any(map(is_out_of_memory, [ecc, ValueError("out of memory"), OSError(errno.ENOSPC, "No space left")]))
