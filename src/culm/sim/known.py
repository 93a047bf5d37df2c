"""Models whose speed was published, so that a study can be made without a profile.

On demand, D = 4 pipelines of 8 (or 4) V100 were measured (Bamboo, Table 2). From samples per second follows what a
micro-batch takes in a stage, if 1F1B is what was run; at 1.5 times the depth, as on spot, a stage has that much less
to do. State is 12 bytes a parameter: fp32 with two moments of Adam.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from culm.errors import UsageError
from culm.schedule import Costs
from culm.sim.workload import Workload

PIPELINES = 4


@dataclass(frozen=True)
class Measured:
    """What Bamboo's authors measured on demand, and how they ran it."""

    samples_per_s: float
    batch: int
    micro_batch: int
    stages: int
    """On demand; 1.5 times as many on spot."""
    parameters: float
    layers: int

    @property
    def micro_batches(self) -> int:
        return self.batch // self.micro_batch

    @property
    def total_s(self) -> float:
        """A micro-batch through the whole model, there and back."""
        step_s = self.batch / self.samples_per_s
        return step_s / (-(-self.micro_batches // PIPELINES) + self.stages - 1) * self.stages


MEASURED = {
    "resnet-152": Measured(32, 384, 16, 8, 60e6, 152),
    "vgg-19": Measured(167, 384, 8, 4, 144e6, 19),
    "alexnet": Measured(336, 576, 8, 4, 61e6, 8),
    "gnmt-16": Measured(24, 32, 4, 4, 290e6, 16),
    "bert-large": Measured(108, 256, 2, 8, 340e6, 24),
    "gpt-2": Measured(30, 32, 4, 8, 1.5e9, 48),
}


def known(name: str, *, spot: bool = True, split: bool = True) -> Workload:
    """A measured model as a workload, at the depth it had on spot or on demand.

    Raises UsageError for one that was not measured, with the nearest that was.
    """
    if name not in MEASURED:
        close = difflib.get_close_matches(name, MEASURED, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(MEASURED)}; others come with --plan"
        raise UsageError(f"there is no model {name!r} with published speed: {hint}")
    model = MEASURED[name]
    stages = model.stages * 3 // 2 if spot else model.stages
    each = model.total_s / stages / 3
    return Workload(
        name=name,
        pipelines=PIPELINES,
        stages=stages,
        micro_batches=model.micro_batches,
        micro_batch=model.micro_batch,
        costs=Costs(forward=each, input=each, weight=each),
        state_bytes=12 * model.parameters,
        least_stages=model.stages,
        layers=max(model.layers, stages),
        memory="1f1b",
        split=split,
        stagger=split,
        instance="p3.2xlarge",
    )
