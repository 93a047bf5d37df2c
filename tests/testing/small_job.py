"""A job that trains in milliseconds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from culm import Job

WIDTH = 4
DATA = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)), torch.zeros(WIDTH)) for i in range(32)]


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def job(**fields: Any) -> Job:
    """Four layers, four micro-batches of two, three steps, exact."""
    described: dict[str, Any] = {
        "layers": [linear] * 4,
        "loss": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "data": DATA,
        "global_batch": 8,
        "micro_batch": 2,
        "steps": 3,
        "exact": True,
    }
    return Job(**{**described, **fields})
