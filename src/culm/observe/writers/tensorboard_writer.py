"""TensorBoard: a scalar for the loss, the norm, the evaluation loss and each named value of every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from culm.observe.writers.run_folder import local_path
from culm.observe.writers.writer import RunInfo, Writer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from culm.observe.step_metrics import StepMetrics

FOLDER = "tensorboard"
"""Inside the run folder: tensorboard --logdir runs/a/tensorboard."""
_NOT_DRAWN = frozenset(("step", "t", "samples", "skipped", "samples_lost", "samples_duplicated"))


class TensorBoardWriter(Writer):
    """Writes event files into the folder `tensorboard` of the run folder."""

    def __init__(self) -> None:
        self._log_dir = ""
        self._events: SummaryWriter | None = None

    def open(self, run: RunInfo) -> None:
        assert run.out is not None
        self._log_dir = f"{local_path(run.out) or run.out.rstrip('/')}/{FOLDER}"
        self._open_at(run.first_step)

    def _open_at(self, step: int) -> None:
        """Begin an event file. TensorBoard drops points from this step on that earlier files have."""
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(self._log_dir, purge_step=step or None)

    def write_step(self, metrics: StepMetrics) -> None:
        assert self._events is not None
        for name, value in metrics.to_fields().items():
            if name not in _NOT_DRAWN and value is not None:
                self._events.add_scalar(name, value, metrics.step)
        self._events.flush()  # a leader that is killed loses no more than the step it was writing

    def write_event(self, event: Mapping[str, Any]) -> None:
        """After a rewind the steps from there on come again."""
        if event["kind"] == "rewound":
            self.close(None)
            self._open_at(event["step"])

    def close(self, summary: Mapping[str, Any] | None) -> None:  # noqa: ARG002 part of the contract
        if self._events is not None:
            self._events.close()
