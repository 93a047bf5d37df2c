"""Overhead of torch's schedule runtime: stages that compute nothing, tensors of one number."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch
from benchmarks.pipeline.torch_pipeline import TorchPipeline, stages_per_worker, worker_count
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.common.gpt_job import ModuleFactory

    from culm.job import Dataset, Precision

ACTIONS_PER_MICRO_BATCH = {"gpipe": 2, "1f1b": 2, "zb": 3, "interleaved": 2}
"""Compute actions of a stage for one micro-batch: F and B, or F, I and W."""


class NoOpLayer(nn.Module):
    """As little work as autograd allows: one parameter of one number, one addition."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


@dataclass(frozen=True, kw_only=True)
class NoOpSpec:
    """Layers that do nothing, with an optimizer that changes nothing."""

    depth: int
    micro_batches: int
    micro_batch: int = 1
    seed: int = 0
    clip_norm: float | None = None
    device: str = "cpu"
    precision: Precision = "fp32"

    def layers(self) -> Sequence[ModuleFactory]:
        return [NoOpLayer] * self.depth

    def data(self) -> Dataset:
        return [(torch.zeros(1), torch.zeros(1))]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).sum()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.0)


@dataclass(frozen=True, kw_only=True)
class ActionOverhead:
    """Microseconds per compute action (F, B, I or W), including its share of sends, receives and the step."""

    cpu_us: float
    """CPU time of all workers divided by all actions: bubbles and missing cores have no influence."""
    wall_us: float
    """Time of a step divided by the actions of one worker: bubbles and waiting included."""


def torch_us_per_action(
    stages: int = 1, schedule: str = "1f1b", *, micro_batches: int = 32, steps: int = 10, rounds: int = 5
) -> ActionOverhead:
    """torch's overhead per action, median of the rounds. With one stage nothing is sent: only the interpreter."""
    cut = tuple(range(number, number + 1) for number in range(stages * stages_per_worker(schedule)))
    spec = NoOpSpec(depth=len(cut), micro_batches=micro_batches)
    total_actions = len(cut) * micro_batches * ACTIONS_PER_MICRO_BATCH[schedule] * steps
    with TorchPipeline(spec, cut, schedule) as pipeline:
        pipeline.run_round(steps)
        measured = [(pipeline.run_round(steps), pipeline.cpu_s) for _ in range(rounds)]
    wall, cpu = median(wall for wall, _ in measured), median(cpu for _, cpu in measured)
    return ActionOverhead(
        cpu_us=1e6 * cpu / total_actions, wall_us=1e6 * wall * worker_count(cut, schedule) / total_actions
    )
