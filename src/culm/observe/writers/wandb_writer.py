"""Weights & Biases: a point for every step, the shape of the run as its config, the summary at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from culm.observe.writers.writer import RunInfo, Writer

if TYPE_CHECKING:
    from culm.observe.step_metrics import StepMetrics

_SUMMARY_KEYS = ("goodput", "wall_s", "preemptions", "samples", "final_loss", "weights_sha256", "cost_usd")


class WandbWriter(Writer):
    """Logs to the project of WANDB_PROJECT (default: culm), under the run's id: another leader continues the run."""

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, run: RunInfo) -> None:
        import wandb  # type: ignore[import-not-found,unused-ignore]

        project = os.environ.get("WANDB_PROJECT", "culm")
        self._run = wandb.init(project=project, name=run.name, id=run.id, resume="allow", config=dict(run.config))

    def write_step(self, metrics: StepMetrics) -> None:
        values = {name: value for name, value in metrics.to_fields().items() if name != "step"}
        self._run.log(values, step=metrics.step)

    def close(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._run.summary.update({name: summary[name] for name in _SUMMARY_KEYS if name in summary})
        self._run.finish(exit_code=0 if summary is not None else 1)
