"""What shadows keep leaves a real GPU: its memory is free, and the bits are the same. `pytest -m gpu` runs these."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.runtime.sample_jobs import job_with
from torch import Tensor, nn

from culm import Job
from culm.device import device_copies
from culm.device.cuda_streams import CudaStreams
from culm.device.device_copies import open_device
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.off_loaded_tape import OffLoadedTape, SavedTensors
from culm.runtime.compute.segment import Segment
from culm.testing import Faults, simulate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, ROWS = 256, 2048
NO_OFF_LOADING = 1 << 60


class Deep(nn.Module):
    """Keeps 16 tensors of 2 MB for each micro-batch, and has 2 MB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = nn.functional.gelu(part(x))
        return x


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
        return drawn, drawn.flip(0)


def deep_job(**fields: Any) -> Job:
    return job_with(
        layers=[Deep] * 3,
        loss=nn.functional.mse_loss,
        data=Rows(),
        global_batch=8,
        micro_batch=1,
        steps=4,
        device="cuda",
        exact=True,
        **fields,
    )


@pytest.fixture(autouse=True)
def _usual_algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CudaStreams, "free_bytes", 0)  # where there is room nothing leaves the device
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tape_frees_the_memory_of_the_device_and_gives_the_same_bits(precision: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies = open_device(device)
    job = deep_job(precision=precision)
    segment = Segment(job, ModelState(job, [0, 1, 2], device), [1])
    drawn = torch.randn(ROWS, WIDTH, device=device)
    arrived = (torch.randn(ROWS, WIDTH, device=device),)

    def gradients(*, leaves: bool) -> tuple[list[Tensor], int, int]:
        """With the bytes of the device that the tape takes, before and after it left."""
        for layer in segment.layers:
            for parameter in layer.trainable.values():
                parameter.grad = None
            layer.accumulator.clear()
        torch.cuda.synchronize()
        without = torch.cuda.memory_allocated()
        saved = SavedTensors(device, [layer.module for layer in segment.layers], copies.min_off_loaded_bytes)
        with saved.noting():
            outputs, _ = segment.forward(0, 0, (drawn.clone().requires_grad_(),))
        tape = segment.tapes[0, 0]
        tape.off_loaded = saved.off_loaded(tape, copies)
        arrived_here = tuple(g.to(o.dtype) for g, o in zip(arrived, outputs, strict=True))
        del saved, outputs
        torch.cuda.synchronize()
        before = after = torch.cuda.memory_allocated() - without
        if leaves:
            tape.off_loaded.leave_device()
            torch.cuda.synchronize()
            copies._release_completed()
            after = torch.cuda.memory_allocated() - without
        else:
            tape.off_loaded = None
        del tape
        found = segment.backward(0, 0, arrived_here)
        totals = [layer.accumulator.copy_total_to_cpu() for layer in segment.layers]
        segment.free_last_tape()
        return [*(g for g in found if g is not None), *totals], before, after

    wanted, *_ = gradients(leaves=False)
    ours, before, after = gradients(leaves=True)
    assert after < before / 4
    for mine, theirs in zip(ours, wanted, strict=True):
        assert torch.equal(mine, theirs)
    copies.close()


def test_a_run_with_shadows_needs_less_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers of the run are in this process: what is measured is the memory of all of them."""
    left: list[int] = []
    leave_device = OffLoadedTape.leave_device

    def noted(self: OffLoadedTape) -> None:
        left.append(self.copied_bytes)
        leave_device(self)

    monkeypatch.setattr(OffLoadedTape, "leave_device", noted)
    job = deep_job()
    run = partial(simulate, job, pipelines=1, stages=3)
    undisturbed = run(strategy="none")
    peaks = []
    for min_bytes in (device_copies.MIN_OFF_LOADED_BYTES, NO_OFF_LOADING):
        monkeypatch.setattr(device_copies, "MIN_OFF_LOADED_BYTES", min_bytes)
        left.clear()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        found = run(strategy="shadow")
        peaks.append(torch.cuda.max_memory_allocated())
        assert found.state_sha256 == undisturbed.state_sha256
        assert any(left) == (min_bytes != NO_OFF_LOADING)
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
@pytest.mark.parametrize("at", ["0F1", "0F5", "1F6"])
def test_a_loss_after_shadows_have_off_loaded_changes_no_bit(at: str, schedule: str) -> None:
    job = deep_job()
    run = partial(simulate, job, pipelines=1, stages=3, schedule=schedule)
    faults = Faults().kill(int(at[0]), at=at, step=1)
    disturbed = run(strategy="shadow", faults=faults)
    assert disturbed.summary["preemptions"] == 1
    assert disturbed.state_sha256 == run(strategy="none").state_sha256
