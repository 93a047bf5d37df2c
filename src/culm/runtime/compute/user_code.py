"""Call user code, layers and the loss, in a way that does not depend on how the model is partitioned.

Between layers tensors are contiguous, and so are their gradients: the order of a sum depends on the memory layout, and
a frame is contiguous. A layer may write into its input, as it may in one process.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from culm.errors import CulmError, JobError, LayerFailed, message_suffix
from culm.runtime.compute.batch_loading import Activations, pack_activations
from culm.runtime.compute.rng import python_rng_state, seed_layer
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.compute.model_state import LayerReplica

T = TypeVar("T")


class UserCodeTraits:
    """How some user code treats its inputs. Learned while it runs, so that expensive precautions are only taken where
    they are needed. Unknown properties are treated with all precautions.

    Code that takes another path for other data can behave differently from what was learned: it may draw random
    numbers, or produce another gradient layout, for the first time. So `exact` runs always take all precautions. In
    other runs the last bits may then depend on the partition.
    """

    def __init__(self, *, exact: bool = False, uses_python_rng: bool | None = None) -> None:
        self._exact = exact
        self.writes_inputs: bool | None = None
        """Whether it writes into its input: then it gets copies. (torch raises an error for code that begins to write
        later.)"""
        self.uses_python_rng = True if exact else uses_python_rng
        """Whether it may draw from `random` or numpy, which are slow to seed. Known after the first training
        forward."""
        self._rng_state_before: tuple[object, ...] = ()
        self._grad_is_contiguous: dict[tuple[int, torch.Size], bool] = {}
        """By input and shape: whether the gradient that it produces is contiguous without help."""

    def seed(self, seed: int) -> None:
        """Before a run: seed its random draws."""
        seed_layer(seed, python_rng=self.uses_python_rng is not False)
        if self.uses_python_rng is None:
            self._rng_state_before = python_rng_state()

    def prepare_inputs(self, values: Activations) -> Activations:
        """The values as the code gets them."""
        if self.writes_inputs is False and len(values) == 1 and self._can_pass_unchanged(*values):
            return values
        taped = torch.is_grad_enabled()
        prepared = tuple(self._prepare_input(n, value.contiguous(), taped) for n, value in enumerate(values))
        return prepared if self.writes_inputs is False else tuple(value.clone() for value in prepared)

    def _can_pass_unchanged(self, value: Tensor) -> bool:
        """Whether a single value can be passed as it is: the fast path of `_prepare_input`, which most layers take."""
        if not value.is_contiguous():
            return False
        if not value.requires_grad:
            return True
        return self._grad_is_contiguous.get((0, value.shape), False) and not _is_autocast_leaf(value)

    def _prepare_input(self, number: int, value: Tensor, taped: bool) -> Tensor:
        """The same values. A round trip through a flat view costs little, and makes the gradient contiguous."""
        if not (taped and value.requires_grad):
            return value
        place = number, value.shape
        lies = self._grad_is_contiguous.get(place)
        if lies:
            return value.view_as(value) if _is_autocast_leaf(value) else value
        flat = value.view(-1).view(value.shape)
        if lies is None and not self._exact:
            flat.register_hook(lambda gradient: self._record_grad_layout(place, gradient))
        return flat

    def _record_grad_layout(self, place: tuple[int, torch.Size], gradient: Tensor) -> None:
        self._grad_is_contiguous[place] = gradient.is_contiguous() and self._grad_is_contiguous.get(place, True)

    @property
    def is_incomplete(self) -> bool:
        """Whether a training forward can still show something that is not known."""
        return self.writes_inputs is None or self.uses_python_rng is None

    def update_from_run(self, prepared_inputs: Activations, values: Activations) -> None:
        """After a training forward: from now on copy only if it wrote, and seed only what it drew from."""
        if self.writes_inputs is None:
            self.writes_inputs = any(map(_was_written, prepared_inputs, values))
        if self.uses_python_rng is None:
            self.uses_python_rng = python_rng_state() != self._rng_state_before


def _was_written(copy: Tensor, value: Tensor) -> bool:
    """Whether the code wrote into a copy. A write through `.data` does not change the version counter."""
    if copy._version or isinstance(value, FakeTensor) or value.is_nested:
        return copy._version > 0
    return not torch.equal(copy, value)


def _is_autocast_leaf(value: Tensor) -> bool:
    """Whether autocast would cache the cast of this leaf: its gradient would be summed in another type than inside a
    graph."""
    return value.is_leaf and torch.is_autocast_enabled(value.device.type)


def detach_contiguous(value: Tensor) -> Tensor:
    """The same values as a new contiguous leaf."""
    return value.detach().contiguous().requires_grad_(value.requires_grad)


_NO_CONTEXT: AbstractContextManager[None] = nullcontext()


def call_layer(layer: LayerReplica, values: Activations, seed: int) -> Activations:
    """Run one layer's forward with its own seed. Raises LayerFailed, which names the layer, for an exception of the
    user's code."""
    layer.traits.seed(seed)
    prepared = layer.traits.prepare_inputs(values)
    several = len(prepared) > 1
    try:
        with layer.large_gradients or _NO_CONTEXT:
            output = (
                layer.module(*prepared)
                if several and layer.unpacks_inputs
                else layer.module(prepared if several else prepared[0])
            )
    except CulmError:
        raise
    except ASYNC_USER_EXCEPTIONS as error:
        shapes = ", ".join(f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in values)
        how = " as one tuple (forward gets several arguments if it names them without defaults)"
        how = how if several and not layer.unpacks_inputs else ""
        raise LayerFailed(
            f"{layer.label} raised {type(error).__name__} on input {shapes}{how}{message_suffix(error)}"
        ) from error
    if layer.traits.is_incomplete and layer.module.training:
        layer.traits.update_from_run(prepared, values)
    return pack_activations(output, f"the output of {layer.label}") if not isinstance(output, Tensor) else (output,)


def call_within(seconds: float, function: Callable[[], T], message: str) -> T:
    """Call a function of the user and return its result. Raises JobError with this message if it takes longer.

    It is interrupted by a signal, and not run in another thread, because some data sets depend on their thread. So
    there is no limit outside of the main thread, or while the process uses this timer for something else.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        return function()
    before = signal.signal(signal.SIGALRM, _raise_too_late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return function()
    except _TooLate:
        raise JobError(message) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _TooLate(BaseException):
    """Interrupts user code, which catches no exception of this kind."""


def _raise_too_late(_signal: int, _frame: object) -> None:
    raise _TooLate


def late_message(job: Job) -> str:
    """The end of a sentence about data that `call_within` waited for."""
    return f"within {job.loader_timeout:g} s: a data set must not hang, and Job.loader_timeout allows more time"


def compute_loss(
    job: Job, outputs: Activations, target: Any, seed: int, traits: UserCodeTraits | None = None
) -> tuple[Tensor, Tensor | float | None]:
    """(loss, weight) of a micro-batch; the weight is None unless the loss returns (sum, weight). The loss is seeded
    like one more layer."""
    traits = traits or UserCodeTraits(exact=True)
    traits.seed(seed)
    prepared = traits.prepare_inputs(outputs)
    try:
        returned = job.loss(prepared[0] if len(prepared) == 1 else prepared, target)
    except CulmError:
        raise
    except ASYNC_USER_EXCEPTIONS as error:
        raise LayerFailed(f"the loss raised {type(error).__name__}{message_suffix(error)}") from error
    traits.update_from_run(prepared, outputs)
    loss, weight = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise JobError(f"Job.loss returned {shape}: return a scalar mean, or (sum, weight)")
    if loss.is_complex():
        raise JobError("Job.loss returned a complex number: return a real one, such as its absolute value")
    return loss if loss.ndim == 0 else loss.reshape(()), _check_weight(weight)


def _check_weight(weight: Any) -> Tensor | float | None:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise JobError(f"Job.loss returned a weight of shape {tuple(weight.shape)}: return one number for all")
        return weight.detach()
    if weight is None or isinstance(weight, SupportsFloat):
        return weight if weight is None else float(weight)
    raise JobError(f"Job.loss returned a {type(weight).__name__} as its weight: return a scalar mean, or (sum, weight)")
