"""The named values of one micro-batch: computed on the last stage, next to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias

import torch
from torch import Tensor

from culm.errors import CulmError, JobError, LayerFailed, message_suffix
from culm.metric import Metric, collecting
from culm.runtime.compute.rng import seed_layer
from culm.runtime.compute.user_code import UserCodeTraits, compute_loss
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.compute.batch_loading import Activations

MicroBatchValue: TypeAlias = Tensor | float


class MetricValues:
    """Computes the values of `Job.metrics` for one micro-batch after the other."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._recorded_names = [name for name, metric in metrics.items() if metric.function is None]

    def compute_loss(
        self, job: Job, outputs: Activations, target: Any, seed: int, traits: UserCodeTraits | None = None
    ) -> tuple[Tensor, MicroBatchValue | None, tuple[MicroBatchValue, ...]]:
        """The loss and its weight as `user_code.compute_loss` returns them, and the values in declared order.

        Raises JobError for a value that is not a scalar, undeclared or missing, LayerFailed if a function raises.
        """
        with collecting(self._recorded_names) as recorded:
            loss, weight = compute_loss(job, outputs, target, seed, traits)
        recorded.check_complete()
        values = dict(recorded.values)
        if len(values) < len(self._metrics):
            values |= self._call_functions(outputs, target, seed)
        return loss, weight, tuple(_check_scalar(name, values[name]) for name in self._metrics)

    def _call_functions(self, outputs: Activations, target: Any, seed: int) -> dict[str, Any]:
        """Call the functions on the detached output. They draw from the same key as the loss."""
        detached = tuple(output.detach() for output in outputs)
        values = {}
        for name, metric in self._metrics.items():
            if metric.function is not None:
                seed_layer(seed)
                try:
                    with torch.no_grad():
                        values[name] = metric.function(detached[0] if len(detached) == 1 else detached, target)
                except CulmError:
                    raise
                except ASYNC_USER_EXCEPTIONS as error:
                    raise LayerFailed(
                        f"Job.metrics[{name!r}] raised {type(error).__name__}{message_suffix(error)}"
                    ) from error
        return values


def _check_scalar(name: str, value: Any) -> MicroBatchValue:
    """A tensor is not converted to a number here: that would wait for the device."""
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.detach()
        kind = "complex tensor" if value.is_complex() else f"tensor of shape {tuple(value.shape)}"
        raise JobError(f"Job.metrics[{name!r}] is a {kind}: use one real number for each micro-batch, as value.mean()")
    if isinstance(value, SupportsFloat) and not isinstance(value, str):
        return float(value)
    raise JobError(f"Job.metrics[{name!r}] is a {type(value).__name__}: use one real number for each micro-batch")
