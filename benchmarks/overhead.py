"""What torch's schedule runtime costs by itself: stages that compute nothing, tensors of one number."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from benchmarks.peer import TorchPipeline, stages_per_worker, workers_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.job import Factory
    from culm.job import Dataset

ACTIONS = {"gpipe": 2, "1f1b": 2, "zb": 3, "interleaved": 2}
"""Compute actions of a stage for one micro-batch: F and B, or F, I and W."""


class Nothing(nn.Module):
    """As close to no work as autograd allows: one parameter of one number, one addition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


@dataclass(frozen=True, kw_only=True)
class NothingSpec:
    """Layers that do nothing, trained by an optimizer that moves nothing."""

    depth: int
    micro_batches: int
    micro_batch: int = 1
    seed: int = 0

    def layers(self) -> Sequence[Factory]:
        return [Nothing] * self.depth

    def data(self) -> Dataset:
        return [(torch.zeros(1), torch.zeros(1))]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)


@dataclass(frozen=True, kw_only=True)
class PerAction:
    """Microseconds per compute action (F, B, I or W), its share of sends, receives and the step included."""

    cpu_us: float
    """CPU time of all workers over all their actions: bubbles and missing cores do not show."""
    wall_us: float
    """Time of a step over the actions of one worker: bubbles and waiting included."""


def torch_us_per_action(
    stages: int = 1, schedule: str = "1f1b", *, micro_batches: int = 32, steps: int = 10, rounds: int = 5
) -> PerAction:
    """torch's own share of an action, median of the rounds. With one stage nothing is sent: the interpreter alone."""
    cut = tuple(range(number, number + 1) for number in range(stages * stages_per_worker(schedule)))
    spec = NothingSpec(depth=len(cut), micro_batches=micro_batches)
    everyone = len(cut) * micro_batches * ACTIONS[schedule] * steps
    with TorchPipeline(spec, cut, schedule) as pipeline:
        pipeline.round(steps)
        measured = [(pipeline.round(steps), pipeline.cpu_s) for _ in range(rounds)]
    wall, cpu = median(wall for wall, _ in measured), median(cpu for _, cpu in measured)
    return PerAction(cpu_us=1e6 * cpu / everyone, wall_us=1e6 * wall * workers_of(cut, schedule) / everyone)
