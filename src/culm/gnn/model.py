"""What is trained: a GCN or a GAT, its parameters under the names that PyG gives them, and its draws of chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from culm.errors import UsageError
from culm.runtime.keys import key

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["gcn", "gat"]
_MOST_LAYERS = 10_000
Weights = dict[str, "Tensor"]
"""Parameters of one layer: `lin.weight` (out, in), `bias`, and under attention `att_src`, `att_dst`."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Graph convolutions one after the other, ReLU and dropout in between, as PyG's GCN and GAT are built.

    `widths` runs from the features to the classes. Heads of a GAT are concatenated, in the last layer averaged.
    """

    kind: Kind
    widths: tuple[int, ...]
    heads: int = 1
    dropout: float = 0.5
    input_dropout: float = 0.5
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("gcn", "gat"):
            raise UsageError(f"--model {self.kind!r}: there are gcn and gat")
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise UsageError(f"widths are {self.widths}: a model has at least one layer, and no width below 1")
        for name in ("dropout", "input_dropout", "attention_dropout"):
            p = getattr(self, name)
            if not 0 <= p < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {p}: give a share from 0 up to, not including, 1")
        if self.kind == "gcn" and self.attention_dropout:
            raise UsageError(f"--attention-dropout is {self.attention_dropout}: a gcn has no attention, use 0 or a gat")
        if self.heads < 1 or (self.kind == "gcn" and self.heads != 1):
            raise UsageError(f"--heads {self.heads}: a gat has 1 or more, a gcn has none to choose")
        for width in self.widths[1:-1]:
            if width % self.heads:
                raise UsageError(
                    f"--hidden {width} is no multiple of --heads {self.heads}: every head has the same width"
                )

    @property
    def layers(self) -> int:
        return len(self.widths) - 1

    def channels(self, layer: int) -> int:
        """Width of one head."""
        out = self.widths[layer + 1]
        return out if layer == self.layers - 1 else out // self.heads

    def shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of a layer's parameters."""
        if self.kind == "gcn":
            return {"lin.weight": (self.widths[layer + 1], self.widths[layer]), "bias": (self.widths[layer + 1],)}
        heads, channels = self.heads, self.channels(layer)
        return {
            "lin.weight": (heads * channels, self.widths[layer]),
            "att_src": (1, heads, channels),
            "att_dst": (1, heads, channels),
            "bias": (self.widths[layer + 1],),
        }

    def initial(self, layer: int, seed: int) -> Weights:
        """First weights of a layer: Glorot's, zeros for the bias; a function of (seed, layer) alone."""
        found = {}
        for name, shape in self.shapes(layer).items():
            draw = torch.Generator().manual_seed(key(seed, "gnn", layer, name))
            bound = 0.0 if name == "bias" else math.sqrt(6.0 / (shape[-2] + shape[-1]))
            found[name] = (torch.rand(shape, generator=draw) * 2 - 1) * bound
        return found


def check_whole(name: str, given: object) -> None:
    """Raise UsageError for what is no whole number."""
    if not isinstance(given, int) or isinstance(given, bool):
        raise UsageError(f"--{name.replace('_', '-')} is {given!r}: give a whole number")


def multiple(width: int, heads: int) -> int:
    """The width, or as little more as it takes for every head to have the same."""
    return -(-width // max(heads, 1)) * max(heads, 1)


def model_of(
    given: Any,
    *,
    width: int,
    classes: int,
    layers: int,
    hidden: int,
    heads: int,
    dropout: float,
    input_dropout: float | None,
    attention_dropout: float | None = None,
) -> Model:
    """The Model that a user means: one, "gcn" or "gat" with options, or a PyG GCN or GAT, whose shape it takes over.

    Raises UsageError for anything else, and for a model that does not fit features and classes.
    """
    if isinstance(given, Model):
        found = given
    elif isinstance(given, str):
        for name, number in (("layers", layers), ("hidden", hidden), ("heads", heads)):
            check_whole(name, number)
        if layers < 1:
            raise UsageError(f"--layers {layers}: a model has at least one")
        if layers > _MOST_LAYERS:
            raise UsageError(f"--layers {layers}: a model has at most {_MOST_LAYERS}")
        kind: Any = given
        into = dropout if input_dropout is None else input_dropout
        shape = (width, *[hidden] * (layers - 1), classes)
        along = (dropout if kind == "gat" else 0.0) if attention_dropout is None else attention_dropout
        found = Model(
            kind=kind, widths=shape, heads=heads, dropout=dropout, input_dropout=into, attention_dropout=along
        )
    else:
        found = shape_of(given)
    if found.widths[0] != width or found.widths[-1] < classes:
        raise UsageError(
            f"the model is made for {found.widths[0]} features and {found.widths[-1]} classes, "
            f"the graph has {width} and {classes}: make them agree"
        )
    return found


def shape_of(module: Any) -> Model:
    """The Model that a GCN or GAT of PyG is. Raises UsageError for anything else."""
    kind: Any = type(module).__name__.lower()
    convs = getattr(module, "convs", None)
    known = {"GCNConv", "GATConv"}
    if kind not in ("gcn", "gat") or convs is None or {type(c).__name__ for c in convs} - known:
        raise UsageError(
            f"model is a {type(module).__name__}: give 'gcn', 'gat', a culm.gnn.Model, or a GCN or GAT of PyG"
        )
    _check_plain(module)
    heads = [int(getattr(conv, "heads", 1)) for conv in convs]
    widths = [int(convs[0].in_channels), *(int(c.out_channels) * h for c, h in zip(convs, heads, strict=True))]
    widths[-1] = int(convs[-1].out_channels)
    return Model(
        kind=kind,
        widths=tuple(widths),
        heads=heads[0],
        dropout=float(module.dropout.p),
        input_dropout=0.0,
        attention_dropout=float(getattr(convs[0], "dropout", 0.0)),
    )


_PLAIN = {"improved": False, "add_self_loops": True, "normalize": True, "negative_slope": 0.2, "residual": False}
"""Options of PyG's convolutions, as they are computed here."""


def _check_plain(module: Any) -> None:
    """Refuse what PyG can do and this does not, instead of training something else."""
    odd: list[tuple[str, object, object]] = [("act", type(module.act).__name__, "ReLU")]
    odd += [("norm", getattr(module, "norm", None), None), ("jk", getattr(module, "jk_mode", None), None)]
    for conv in module.convs:
        last = conv is module.convs[-1]
        odd += [("concat", getattr(conv, "concat", not last), not last)] if getattr(conv, "heads", 1) > 1 else []
        odd += [(name, getattr(conv, name, plain), plain) for name, plain in _PLAIN.items()]
        odd += [("edge_dim", getattr(conv, "edge_dim", None), None), ("bias", conv.bias is not None, True)]
    for name, found, plain in odd:
        if found != plain:
            raise UsageError(f"model has {name}={found}: only {name}={plain} can be trained here")


def initial_weights(model: Model, seed: int, given: Mapping[str, Tensor] | None) -> dict[int, Weights]:
    """Weights of all layers: from the seed, or from a state dict with PyG's names (`convs.0.lin.weight`, ...)."""
    if given is None:
        return {layer: model.initial(layer, seed) for layer in range(model.layers)}
    found: dict[int, Weights] = {}
    for layer in range(model.layers):
        found[layer] = {}
        for name, shape in model.shapes(layer).items():
            full = f"convs.{layer}.{name}"
            if full not in given or tuple(given[full].shape) != shape:
                there = tuple(given[full].shape) if full in given else "not there"
                raise UsageError(f"init: {full} is {there}: the model needs it with shape {shape}")
            found[layer][name] = given[full].detach().to(torch.float32).clone().contiguous()
    return found


def state_dict(weights: Mapping[int, Weights]) -> dict[str, Tensor]:
    """The names under which torch_geometric.nn.GCN and .GAT load them."""
    return {f"convs.{layer}.{name}": tensor for layer, own in sorted(weights.items()) for name, tensor in own.items()}
