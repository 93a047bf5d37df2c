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
from culm.runtime.keys import seed_layer

if TYPE_CHECKING:
    from culm.job import Job
    from culm.runtime.state import HeldLayer


class Manner:
    """Whether some code writes into its input: found out when it first runs in training, on copies."""

    def __init__(self) -> None:
        self.writes: bool | None = None

    def lend(self, values: Values) -> Values:
        """What the code is given for the values: never a leaf of the graph, which autocast and writing treat apart."""
        lent = tuple(_lent(value) for value in values)
        return lent if self.writes is False else tuple(value.clone() for value in lent)

    def learn(self, lent: Values) -> None:
        """After the first run: from now on, copy only if something was written."""
        if self.writes is None:
            self.writes = any(value._version for value in lent)


def _lent(value: Tensor) -> Tensor:
    """The same numbers in one piece. There and back through a flat view costs nothing, and lays a gradient out so."""
    whole = value.contiguous()
    return whole.view(-1).view(whole.shape) if whole.requires_grad and torch.is_grad_enabled() else whole


def handed_on(value: Tensor) -> Tensor:
    """The same numbers as a fresh leaf, in one piece."""
    return value.detach().contiguous().requires_grad_(value.requires_grad)


def call_layer(layer: HeldLayer, values: Values, step: int, micro: int, seed: int) -> Values:
    """One layer's forward, with its own randomness; an exception of the user's code names the layer."""
    seed_layer(seed, step, micro, layer.index)
    lent = layer.manner.lend(values)
    try:
        several = len(lent) > 1
        made = layer.module(*lent) if several and layer.unpacks else layer.module(lent if several else lent[0])
    except CulmError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in values)
        raise LayerFailed(f"{layer.label} raised {type(error).__name__} on input {shapes}: {error}") from error
    if layer.module.training:
        layer.manner.learn(lent)
    return pack(made, f"the output of {layer.label}") if not isinstance(made, Tensor) else (made,)


def loss_of(
    job: Job, outputs: Values, target: Any, manner: Manner | None = None
) -> tuple[Tensor, Tensor | float | None]:
    """The loss of a micro-batch and, where the loss returns (sum, weight), its weight."""
    manner = manner or Manner()
    lent = manner.lend(outputs)
    try:
        made = job.loss(lent[0] if len(lent) == 1 else lent, target)
    except CulmError:
        raise
    except Exception as error:
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
