"""GCN and GAT: shapes, parameter names (PyG's), and initial weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from culm.errors import UsageError
from culm.runtime.compute.rng import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

ModelKind = Literal["gcn", "gat"]
_MAX_LAYERS = 10_000
LayerWeights = dict[str, "Tensor"]
"""Parameters of one layer: `lin.weight` (out, in), `bias`, and for a GAT `att_src`, `att_dst`."""


class GnnModel(msgspec.Struct, frozen=True, kw_only=True):
    """A stack of graph convolutions with ReLU and dropout in between, as PyG's GCN and GAT.

    `widths` runs from the features to the classes. The heads of a GAT are concatenated, and averaged in the last layer.
    """

    kind: ModelKind
    widths: tuple[int, ...]
    heads: int = 1
    dropout: float = 0.5
    input_dropout: float = 0.5
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("gcn", "gat"):
            raise UsageError(f"--model {self.kind!r}: use gcn or gat")
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise UsageError(f"widths are {self.widths}: a model has at least one layer, and no width below 1")
        for name in ("dropout", "input_dropout", "attention_dropout"):
            p = getattr(self, name)
            if not 0 <= p < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {p}: give a share from 0 up to, not including, 1")
        if self.kind == "gcn" and self.attention_dropout:
            raise UsageError(f"--attention-dropout is {self.attention_dropout}: a gcn has no attention, use 0 or a gat")
        if self.heads < 1 or (self.kind == "gcn" and self.heads != 1):
            raise UsageError(f"--heads {self.heads}: use 1 or more with gat, and leave it out with gcn")
        for width in self.widths[1:-1]:
            if width % self.heads:
                raise UsageError(
                    f"--hidden {width} is not a multiple of --heads {self.heads}: every head has the same width"
                )

    @property
    def layers(self) -> int:
        return len(self.widths) - 1

    def head_width(self, layer: int) -> int:
        """Return the width of one head."""
        out = self.widths[layer + 1]
        return out if layer == self.layers - 1 else out // self.heads

    def parameter_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of a layer's parameters."""
        if self.kind == "gcn":
            return {"lin.weight": (self.widths[layer + 1], self.widths[layer]), "bias": (self.widths[layer + 1],)}
        heads, channels = self.heads, self.head_width(layer)
        return {
            "lin.weight": (heads * channels, self.widths[layer]),
            "att_src": (1, heads, channels),
            "att_dst": (1, heads, channels),
            "bias": (self.widths[layer + 1],),
        }

    def initial_layer_weights(self, layer: int, seed: int) -> LayerWeights:
        """Return the initial weights of a layer: Glorot uniform, zero bias. They depend only on (seed, layer)."""
        weights = {}
        for name, shape in self.parameter_shapes(layer).items():
            generator = torch.Generator().manual_seed(derive_seed(seed, "gnn", layer, name))
            bound = 0.0 if name == "bias" else math.sqrt(6.0 / (shape[-2] + shape[-1]))
            weights[name] = (torch.rand(shape, generator=generator) * 2 - 1) * bound
        return weights


def check_integer(name: str, value: object) -> None:
    """Raise UsageError if the value is not a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"--{name.replace('_', '-')} is {value!r}: give a whole number")


def round_up_to_heads(width: int, heads: int) -> int:
    """Return the smallest multiple of `heads` that is at least `width`."""
    return -(-width // max(heads, 1)) * max(heads, 1)


def resolve_model(
    model: Any,
    *,
    width: int,
    classes: int,
    layers: int,
    hidden: int,
    heads: int,
    dropout: float,
    input_dropout: float | None,
    attention_dropout: float | None = None,
) -> GnnModel:
    """Return the GnnModel for a GnnModel, for "gcn" or "gat" with options, or for a GCN or GAT of PyG, whose shape
    it takes.

    Raises UsageError for anything else, and for a model that does not match the graph's features and classes.
    """
    if isinstance(model, GnnModel):
        resolved = model
    elif isinstance(model, str):
        for name, number in (("layers", layers), ("hidden", hidden), ("heads", heads)):
            check_integer(name, number)
        if layers < 1:
            raise UsageError(f"--layers {layers}: a model has at least one")
        if layers > _MAX_LAYERS:
            raise UsageError(f"--layers {layers}: a model has at most {_MAX_LAYERS}")
        kind: Any = model
        shape = (width, *[hidden] * (layers - 1), classes)
        edge_dropout = (dropout if kind == "gat" else 0.0) if attention_dropout is None else attention_dropout
        resolved = GnnModel(
            kind=kind,
            widths=shape,
            heads=heads,
            dropout=dropout,
            input_dropout=dropout if input_dropout is None else input_dropout,
            attention_dropout=edge_dropout,
        )
    else:
        resolved = model_from_pyg(model)
    if resolved.widths[0] != width or resolved.widths[-1] < classes:
        raise UsageError(
            f"the model is made for {resolved.widths[0]} features and {resolved.widths[-1]} classes, "
            f"the graph has {width} and {classes}: make them agree"
        )
    return resolved


def model_from_pyg(module: Any) -> GnnModel:
    """Return the GnnModel with the shape of a PyG GCN or GAT. Raises UsageError for any other module."""
    kind: Any = type(module).__name__.lower()
    convs = getattr(module, "convs", None)
    known = {"GCNConv", "GATConv"}
    if kind not in ("gcn", "gat") or convs is None or {type(c).__name__ for c in convs} - known:
        raise UsageError(
            f"model is a {type(module).__name__}: give 'gcn', 'gat', a culm.gnn.GnnModel, or a GCN or GAT of PyG"
        )
    _check_supported(module)
    heads = [int(getattr(conv, "heads", 1)) for conv in convs]
    widths = [int(convs[0].in_channels), *(int(c.out_channels) * h for c, h in zip(convs, heads, strict=True))]
    widths[-1] = int(convs[-1].out_channels)
    return GnnModel(
        kind=kind,
        widths=tuple(widths),
        heads=heads[0],
        dropout=float(module.dropout.p),
        input_dropout=0.0,
        attention_dropout=float(getattr(convs[0], "dropout", 0.0)),
    )


_SUPPORTED_OPTIONS = {
    "improved": False,
    "add_self_loops": True,
    "normalize": True,
    "negative_slope": 0.2,
    "residual": False,
}
"""Options of PyG's convolutions with the only value that is supported."""


def _check_supported(module: Any) -> None:
    """Raise UsageError for options of PyG that are not supported, instead of training a different model."""
    options: list[tuple[str, object, object]] = [("act", type(module.act).__name__, "ReLU")]
    options += [("norm", getattr(module, "norm", None), None), ("jk", getattr(module, "jk_mode", None), None)]
    for conv in module.convs:
        last = conv is module.convs[-1]
        options += [("concat", getattr(conv, "concat", not last), not last)] if getattr(conv, "heads", 1) > 1 else []
        options += [(name, getattr(conv, name, only), only) for name, only in _SUPPORTED_OPTIONS.items()]
        options += [("edge_dim", getattr(conv, "edge_dim", None), None), ("bias", conv.bias is not None, True)]
    for name, value, supported in options:
        if value != supported:
            raise UsageError(f"model has {name}={value}: only {name}={supported} can be trained here")


def initial_weights(model: GnnModel, seed: int, init: Mapping[str, Tensor] | None) -> dict[int, LayerWeights]:
    """Return the weights of all layers: from the seed, or from a state dict with PyG's names (`convs.0.lin.weight`,
    ...).

    Raises UsageError if a tensor of `init` is missing or has another shape.
    """
    if init is None:
        return {layer: model.initial_layer_weights(layer, seed) for layer in range(model.layers)}
    weights: dict[int, LayerWeights] = {}
    for layer in range(model.layers):
        weights[layer] = {}
        for name, shape in model.parameter_shapes(layer).items():
            full = f"convs.{layer}.{name}"
            if full not in init or tuple(init[full].shape) != shape:
                actual = tuple(init[full].shape) if full in init else "missing"
                raise UsageError(f"init: {full} is {actual}: the model needs it with shape {shape}")
            weights[layer][name] = init[full].detach().to(torch.float32).clone().contiguous()
    return weights


def pyg_state_dict(weights: Mapping[int, LayerWeights]) -> dict[str, Tensor]:
    """Return the weights under the names that torch_geometric.nn.GCN and .GAT load."""
    return {
        f"convs.{layer}.{name}": tensor
        for layer, layer_weights in sorted(weights.items())
        for name, tensor in layer_weights.items()
    }
