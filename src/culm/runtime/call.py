"""How code of the user is called: layers and the loss, always in the same way, wherever the model is cut.

Between layers tensors lie in one piece of memory, and so do their gradients: the order of a sum depends on how its
numbers lie, and on the wire they lie in one piece. A layer may write into its input, as it may in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from culm.errors import CulmError, JobError, LayerFailed, said
from culm.runtime.data import Values, pack
from culm.runtime.keys import outside_state, seed_layer
from culm.runtime.raised import RAISED

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.state import HeldLayer


class Manner:
    """How some code of the user treats what it is given: learned when it runs, so that what is dear is done only where
    it is needed. What is not known yet is treated with all care.

    Code that goes another way for other data can prove wrong what was learned of it: it might draw, or lay a gradient
    out, as it had not before. So `exact` runs take all care always; in others the last bits may then hang on the cuts.
    """

    def __init__(self, *, exact: bool = False, draws: bool | None = None) -> None:
        self._exact = exact
        self.writes: bool | None = None
        """Whether it writes into its input: then it gets copies. (Who writes later on is stopped by torch.)"""
        self.draws = True if exact else draws
        """Whether it may draw from `random` or numpy: they are slow to seed. Known after the first run in training."""
        self._state: tuple[object, ...] = ()
        self._lays: dict[tuple[int, torch.Size], bool] = {}
        """By input and shape: whether the gradient that it leaves there lies in one piece by itself."""

    def seed(self, draw: int) -> None:
        """Before a run: its draws come from this key."""
        seed_layer(draw, outside=self.draws is not False)
        if self.draws is None:
            self._state = outside_state()

    def lend(self, values: Values) -> Values:
        """What the code is given for the values."""
        if self.writes is False and len(values) == 1 and self._known(*values):
            return values
        taped = torch.is_grad_enabled()
        lent = tuple(self._lent(n, value.contiguous(), taped) for n, value in enumerate(values))
        return lent if self.writes is False else tuple(value.clone() for value in lent)

    def _known(self, value: Tensor) -> bool:
        """Whether the only value can be given as it is: the short way of `_lent`, for what most layers take."""
        if not value.is_contiguous():
            return False
        if not value.requires_grad:
            return True
        return self._lays.get((0, value.shape), False) and not _cast_leaf(value)

    def _lent(self, number: int, value: Tensor, taped: bool) -> Tensor:
        """The same numbers. There and back through a flat view costs little, and lays the gradient out in one piece."""
        if not (taped and value.requires_grad):
            return value
        place = number, value.shape
        lies = self._lays.get(place)
        if lies:
            return value.view_as(value) if _cast_leaf(value) else value
        flat = value.view(-1).view(value.shape)
        if lies is None and not self._exact:
            flat.register_hook(lambda gradient: self._look(place, gradient))
        return flat

    def _look(self, place: tuple[int, torch.Size], gradient: Tensor) -> None:
        self._lays[place] = gradient.is_contiguous() and self._lays.get(place, True)

    @property
    def learns(self) -> bool:
        """Whether a run in training has still something to show."""
        return self.writes is None or self.draws is None

    def learn(self, lent: Values, values: Values) -> None:
        """After a run in training: from now on copy only where something was written, seed only what was drawn from."""
        if self.writes is None:
            self.writes = any(map(_written, lent, values))
        if self.draws is None:
            self.draws = outside_state() != self._state


def _written(copy: Tensor, value: Tensor) -> bool:
    """Whether somebody wrote into a copy; through `.data` that leaves no note."""
    if copy._version or isinstance(value, FakeTensor) or value.is_nested:
        return copy._version > 0
    return not torch.equal(copy, value)


def _cast_leaf(value: Tensor) -> bool:
    """Autocast keeps the casts of leaves: a gradient would be added up in another type than inside a graph."""
    return value.is_leaf and torch.is_autocast_enabled(value.device.type)


def handed_on(value: Tensor) -> Tensor:
    """The same numbers as a fresh leaf, in one piece."""
    return value.detach().contiguous().requires_grad_(value.requires_grad)


def call_layer(layer: HeldLayer, values: Values, draw: int) -> Values:
    """One layer's forward, with its own randomness; an exception of the user's code names the layer."""
    layer.manner.seed(draw)
    lent = layer.manner.lend(values)
    several = len(lent) > 1
    try:
        made = layer.module(*lent) if several and layer.unpacks else layer.module(lent if several else lent[0])
    except CulmError:
        raise
    except RAISED as error:
        shapes = ", ".join(f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in values)
        how = " as one tuple (forward gets several arguments if it names them without defaults)"
        how = how if several and not layer.unpacks else ""
        raise LayerFailed(f"{layer.label} raised {type(error).__name__} on input {shapes}{how}{said(error)}") from error
    if layer.manner.learns and layer.module.training:
        layer.manner.learn(lent, values)
    return pack(made, f"the output of {layer.label}") if not isinstance(made, Tensor) else (made,)


def loss_of(
    job: Job, outputs: Values, target: Any, draw: int, manner: Manner | None = None
) -> tuple[Tensor, Tensor | float | None]:
    """The loss of a micro-batch and, where the loss returns (sum, weight), its weight. It draws like one more layer."""
    manner = manner or Manner(exact=True)
    manner.seed(draw)
    lent = manner.lend(outputs)
    try:
        made = job.loss(lent[0] if len(lent) == 1 else lent, target)
    except CulmError:
        raise
    except RAISED as error:
        raise LayerFailed(f"the loss raised {type(error).__name__}{said(error)}") from error
    manner.learn(lent, outputs)
    loss, weight = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise JobError(f"Job.loss returned {shape}: return a scalar mean, or (sum, weight)")
    if loss.is_complex():
        raise JobError("Job.loss returned a complex number: return a real one, such as its absolute value")
    return loss if loss.ndim == 0 else loss.reshape(()), _checked_weight(weight)


def _checked_weight(weight: Any) -> Tensor | float | None:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise JobError(f"Job.loss returned a weight of shape {tuple(weight.shape)}: return one number for all")
        return weight.detach()
    if weight is None or isinstance(weight, SupportsFloat):
        return weight if weight is None else float(weight)
    raise JobError(f"Job.loss returned a {type(weight).__name__} as its weight: return a scalar mean, or (sum, weight)")
