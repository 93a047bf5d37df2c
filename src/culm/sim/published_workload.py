"""Workloads of models whose speed was published, so that they can be simulated without a profile.

Bamboo, Table 2, has measurements on demand with D = 4 pipelines of 8 (or 4) V100. The time of a micro-batch in a stage
follows from the samples per second, assuming 1F1B; at 1.5 times the depth, as on spot, a stage has that much less work.
State is 12 bytes per parameter: fp32 with two Adam moments.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from culm.errors import UsageError
from culm.schedule import Costs
from culm.sim.workload import Workload

PIPELINES = 4


@dataclass(frozen=True)
class PublishedSpeed:
    """The on-demand measurement of Bamboo's authors and its settings."""

    samples_per_s: float
    batch: int
    micro_batch: int
    stages: int
    """Stages on demand; 1.5 times as many on spot."""
    parameters: float
    layers: int

    @property
    def micro_batches(self) -> int:
        return self.batch // self.micro_batch

    @property
    def micro_batch_s(self) -> float:
        """Seconds of a micro-batch through the whole model, forward and backward."""
        step_s = self.batch / self.samples_per_s
        return step_s / (-(-self.micro_batches // PIPELINES) + self.stages - 1) * self.stages


PUBLISHED_SPEEDS = {
    "resnet-152": PublishedSpeed(32, 384, 16, 8, 60e6, 152),
    "vgg-19": PublishedSpeed(167, 384, 8, 4, 144e6, 19),
    "alexnet": PublishedSpeed(336, 576, 8, 4, 61e6, 8),
    "gnmt-16": PublishedSpeed(24, 32, 4, 4, 290e6, 16),
    "bert-large": PublishedSpeed(108, 256, 2, 8, 340e6, 24),
    "gpt-2": PublishedSpeed(30, 32, 4, 8, 1.5e9, 48),
}


def published_workload(name: str, *, spot: bool = True, split: bool = True) -> Workload:
    """A measured model as a workload, with its depth on spot or on demand.

    Raises UsageError with the nearest known name if the model was not measured.
    """
    if name not in PUBLISHED_SPEEDS:
        close = difflib.get_close_matches(name, PUBLISHED_SPEEDS, n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"use one of {', '.join(PUBLISHED_SPEEDS)}, or --plan for other models"
        )
        raise UsageError(f"there is no model {name!r} with published speed: {hint}")
    model = PUBLISHED_SPEEDS[name]
    stages = model.stages * 3 // 2 if spot else model.stages
    action_s = model.micro_batch_s / stages / 3
    return Workload(
        name=name,
        pipelines=PIPELINES,
        stages=stages,
        micro_batches=model.micro_batches,
        micro_batch=model.micro_batch,
        costs=Costs(forward=action_s, input=action_s, weight=action_s),
        state_bytes=12 * model.parameters,
        least_stages=model.stages,
        layers=max(model.layers, stages),
        memory="1f1b",
        split=split,
        stagger=split,
        instance="p3.2xlarge",
    )
