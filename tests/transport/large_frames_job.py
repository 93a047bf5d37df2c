"""A job whose activations are large enough for shared memory.

With LARGE_FRAMES in the environment, each process that sends a frame through shared memory leaves a file in that
folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from culm import Job
from culm.transport.frames.frame_codec import SharedPlace
from culm.transport.frames.shared_memory import SharedFrames

WIDTH = 384
"""An activation has 590 kB."""


class RandomItems:
    """32 items of random numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, WIDTH, generator=generator), torch.zeros(WIDTH, WIDTH)


def layer() -> nn.Module:
    """A layer that changes its input in place: what was received belongs to the receiver."""
    return nn.Sequential(nn.Hardtanh(-2.0, 2.0, inplace=True), nn.Linear(WIDTH, WIDTH))


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
        device="cpu",
    )


if "LARGE_FRAMES" in os.environ:
    _put = SharedFrames.put

    def _put_and_tell(self: SharedFrames, *arguments: Any) -> Any:
        found = _put(self, *arguments)
        if isinstance(found, SharedPlace):
            Path(os.environ["LARGE_FRAMES"], str(os.getpid())).touch()
        return found

    SharedFrames.put = _put_and_tell  # type: ignore[assignment,method-assign]
