"""A model of your own, in layers: a module or a function that makes one for each, and a tuple between them.

    culm run examples/own_model.py --pipelines 2 --stages 2 --steps 50 --out runs/own --kill "node=0 step=5"

A layer gets what the layer before it returned. Several tensors travel as a tuple, and arrive as arguments.
"""

from functools import partial

import torch
from torch import Tensor, nn

import culm

WIDTH, BLOCKS = 16, 4


class Embed(nn.Module):
    """A point -> (state, point): the point itself goes along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, WIDTH)

    def forward(self, point: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(point), point


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH + 2, WIDTH), nn.Dropout(dropout)

    def forward(self, state: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
        return state + self.dropout(torch.tanh(self.linear(torch.cat([state, point], dim=1)))), point


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, state: Tensor, point: Tensor) -> Tensor:
        del point
        result: Tensor = self.linear(state)
        return result.squeeze(1)


def job() -> culm.Job:
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    return culm.Job(
        layers=[Embed, *[partial(Block, 0.1) for _ in range(BLOCKS)], Head],
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=list(zip(points, points.prod(dim=1), strict=True)),
        global_batch=32,
        micro_batch=8,
        steps=50,
    )
