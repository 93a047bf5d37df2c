"""A job for real processes whose workers compute on emulated devices.

With EMULATED_DEVICE in the environment, importing this module replaces the device of workers in this process by
simulated streams, here in real time. Each worker leaves a file in the folder EMULATED_DEVICE.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from culm import Job
from culm.device.device_copies import DeviceCopies
from culm.device.shared_chunks import PageLocker, SharedChunks, SharedHostMemory
from culm.device.simulated_streams import SimulatedStreams, SimulatedTimes
from culm.runtime.compute import grad_accumulator
from culm.runtime.worker import Worker

WIDTH = 400
"""An activation has 640 kB, so that frames travel through shared memory."""
TIMES = SimulatedTimes(compute=(0.0005, 0.004), copy=(0.0002, 0.002))
_seeds = itertools.count(os.getpid())


def open_emulated(device: torch.device, workers_per_node: int) -> DeviceCopies:
    del device, workers_per_node
    Path(os.environ["EMULATED_DEVICE"], str(os.getpid())).touch()
    shared = SharedHostMemory(SharedChunks(), PageLocker(lock_pages, unlock_pages))
    streams = SimulatedStreams(next(_seeds), TIMES, shared_memory=shared)
    return DeviceCopies(streams, cap=16 << 20, chunk_bytes=4 << 20)


def lock_pages(address: int, size: int) -> bool:
    """Stands in for the driver. Leaves a file."""
    del address, size
    Path(os.environ["EMULATED_DEVICE"], f"locked by {os.getpid()}").touch()
    return True


def unlock_pages(address: int) -> None:
    del address


class RandomItems:
    """64 items of random numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, WIDTH, generator=generator), torch.zeros(WIDTH, WIDTH)


def layer() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def make_job() -> Job:
    return Job(
        layers=[layer] * 4,
        loss=nn.functional.mse_loss,
        optimizer=adamw,
        data=RandomItems(),
        global_batch=8,
        micro_batch=1,
        steps=6,
        exact=True,
        clip_norm=1.0,
        device="cpu",
    )


if "EMULATED_DEVICE" in os.environ:
    (Worker.__init__.__kwdefaults__ or {})["open_device"] = open_emulated
    grad_accumulator.defers_checks = lambda device: True
