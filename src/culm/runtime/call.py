"""How code of the user is called: layers and the loss, always in the same way, wherever the model is cut.

Between layers tensors lie in one piece of memory, and so do their gradients: the order of a sum depends on how its
numbers lie, and on the wire they lie in one piece. A layer may write into its input, as it may in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from culm.errors import CulmError, JobError, LayerFailed
from culm.runtime.data import Values, pack
from culm.runtime.keys import outside_state, seed_layer

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

    def seed(self, seed: int, step: int, micro: int, place: int) -> None:
        """Before a run: its draws come from (seed, step, micro-batch, place in the model)."""
        seed_layer(seed, step, micro, place, outside=self.draws is not False)
        if self.draws is None:
            self._state = outside_state()

    def lend(self, values: Values) -> Values:
        """What the code is given for the values."""
        taped = torch.is_grad_enabled()
        lent = tuple(self._lent(n, value.contiguous(), taped) for n, value in enumerate(values))
        return lent if self.writes is False else tuple(value.clone() for value in lent)

    def _lent(self, number: int, value: Tensor, taped: bool) -> Tensor:
        """The same numbers. There and back through a flat view costs little, and lays the gradient out in one piece."""
        if not (taped and value.requires_grad):
            return value
        place = number, value.shape
        lies = self._lays.get(place)
        if lies:
            # Autocast keeps the casts of leaves: a gradient would be added up in another type than inside a graph.
            return value.view_as(value) if value.is_leaf and torch.is_autocast_enabled(value.device.type) else value
        flat = value.view(-1).view(value.shape)
        if lies is None and not self._exact:
            flat.register_hook(lambda gradient: self._look(place, gradient))
        return flat

    def _look(self, place: tuple[int, torch.Size], gradient: Tensor) -> None:
        self._lays[place] = gradient.is_contiguous() and self._lays.get(place, True)

    def learn(self, lent: Values) -> None:
        """After a run in training: from now on copy only where something was written, seed only what was drawn from."""
        if self.writes is None:
            self.writes = any(value._version for value in lent)
        if self.draws is None:
            self.draws = outside_state() != self._state


def handed_on(value: Tensor) -> Tensor:
    """The same numbers as a fresh leaf, in one piece."""
    return value.detach().contiguous().requires_grad_(value.requires_grad)


def call_layer(layer: HeldLayer, values: Values, step: int, micro: int, seed: int) -> Values:
    """One layer's forward, with its own randomness; an exception of the user's code names the layer."""
    layer.manner.seed(seed, step, micro, layer.index)
    lent = layer.manner.lend(values)
    try:
        several = len(lent) > 1
        made = layer.module(*lent) if several and layer.unpacks else layer.module(lent if several else lent[0])
    except CulmError:
        raise
    except (Exception, SystemExit) as error:
        shapes = ", ".join(f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in values)
        raise LayerFailed(f"{layer.label} raised {type(error).__name__} on input {shapes}: {error}") from error
    if layer.module.training:
        layer.manner.learn(lent)
    return pack(made, f"the output of {layer.label}") if not isinstance(made, Tensor) else (made,)


def loss_of(
    job: Job, outputs: Values, target: Any, step: int = 0, micro: int = 0, manner: Manner | None = None
) -> tuple[Tensor, Tensor | float | None]:
    """The loss of a micro-batch and, where the loss returns (sum, weight), its weight. It draws like one more layer."""
    manner = manner or Manner(exact=True)
    manner.seed(job.seed, step, micro, len(job.layers))
    lent = manner.lend(outputs)
    try:
        made = job.loss(lent[0] if len(lent) == 1 else lent, target)
    except CulmError:
        raise
    except (Exception, SystemExit) as error:
        raise LayerFailed(f"the loss raised {type(error).__name__}: {error}") from error
    manner.learn(lent)
    loss, weight = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise JobError(f"Job.loss returned {shape}: return a scalar mean, or (sum, weight)")
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise JobError(f"Job.loss returned a weight of shape {tuple(weight.shape)}: return one number for all")
        weight = weight.detach()
    return loss if loss.ndim == 0 else loss.reshape(()), weight
