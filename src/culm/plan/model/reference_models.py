"""Well-known models as layer lists with parameters, FLOP and bytes, to plan models that cannot be run locally.

transformer   BERT-Large, GPT-2, GPT-3 from 125M to 175B
decoder       Llama 3, Qwen2.5, Qwen3, Mistral, Mixtral, DeepSeek (`culm.plan.model.decoder_models`)
convolution   ResNet-152, VGG-19, AlexNet
recurrence    GNMT-16
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from culm.errors import PlanError
from culm.plan.model.accelerators import LAYER_LAUNCH_S, MATMUL_EFFICIENCY, MEMORY_EFFICIENCY, Accelerator
from culm.plan.model.decoder_models import DECODER_SHAPES, DEFAULT_GLOBAL_BATCH, DecoderShape
from culm.plan.model.layer_counts import LayerCounts
from culm.plan.model.model_profile import LayerCost, Profile

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class ReferenceModel:
    """A named model with the batch sizes it is usually trained with."""

    name: str
    layers: tuple[LayerCounts, ...]
    global_batch: int
    micro_batch: int
    note: str = ""
    tied_parameters: int = 0
    """Parameters that two layers share: each of them holds a copy."""
    sequence: int = 0
    """Tokens of a sample; 0: its samples have no tokens."""

    @cached_property
    def parameters(self) -> int:
        """Parameters of all layers, tied ones counted in each layer that holds them."""
        return sum(part.parameters for part in self.layers)

    @cached_property
    def unique_parameters(self) -> int:
        """Parameters as models are named by: tied ones count once."""
        return self.parameters - self.tied_parameters

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that compute a token: of the experts only those that it is routed to; tied ones count once."""
        return self.unique_parameters - sum(part.idle_parameters for part in self.layers)

    @cached_property
    def flop(self) -> float:
        """FLOP of one sample, forward and backward."""
        return sum(3 * (part.flop + part.parameterless_flop) for part in self.layers)

    def profile(
        self, device: Accelerator, micro_batch: int, *, precision: str = "fp32", recompute: bool = False
    ) -> Profile:
        """Estimate the cost of each layer on `device` from its counts and the device's figures.

        Raises PlanError for a precision that is not known.
        """
        if precision not in PRECISIONS:
            raise PlanError(f"precision is {precision!r}: use one of {', '.join(PRECISIONS)}")
        layers = tuple(_estimate_layer_cost(part, device, micro_batch, precision, recompute) for part in self.layers)
        words = f"{device.name}, {precision}{', recompute' if recompute else ''}"
        return Profile(layers=layers, device=words, micro_batch=micro_batch, threads=1, source="estimated")


def _estimate_layer_cost(
    layer: LayerCounts, device: Accelerator, micro_batch: int, precision: str, recompute: bool
) -> LayerCost:
    """Estimate one layer: the time of its products or of its memory traffic, whichever is longer."""
    value_bytes = 2 if precision == "bf16" else 4
    values = layer.parameters + micro_batch * (layer.saved_values + layer.output_values)
    moved_s = values * value_bytes / (MEMORY_EFFICIENCY * device.bandwidth)

    def duration(flop: float) -> float:
        return LAYER_LAUNCH_S + max(
            micro_batch * flop / (MATMUL_EFFICIENCY[precision] * device.peak_flops(precision)), moved_s
        )

    forward = duration(layer.flop + layer.parameterless_flop)
    kept = layer.output_values if recompute else layer.saved_values
    # Under autocast each forward converts the weights of its products, and keeps them for its backward.
    cast_weights = 2 * layer.parameters if precision == "bf16" and layer.flop and not recompute else 0
    return LayerCost(
        name=layer.name,
        forward_s=forward,
        input_s=duration(layer.flop + 2 * layer.parameterless_flop) + (forward if recompute else 0.0),
        weight_s=duration(layer.flop) if layer.parameters else 0.0,
        # Parameters stay in fp32, with fp32 gradients and two Adam moments.
        parameter_bytes=4 * layer.parameters,
        state_bytes=12 * layer.parameters,
        activation_bytes=round(micro_batch * kept * value_bytes) + cast_weights,
        output_bytes=round(micro_batch * layer.output_values * value_bytes),
        step_s=28 * layer.parameters / (MEMORY_EFFICIENCY * device.bandwidth),
    )


# Transformers


def _transformer(layers: int, hidden: int, sequence: int, vocabulary: int) -> tuple[LayerCounts, ...]:
    """Embedding, blocks, head. A block has 12 h^2 parameters and keeps 34 bytes in 16 bit for each token and channel
    (Korthikanti et al., 2022, with fused attention). A tied embedding is counted twice: both stages hold it."""
    token = sequence * hidden
    block = LayerCounts(
        "block",
        parameters=12 * hidden * hidden + 13 * hidden,
        flop=24.0 * token * hidden,
        saved_values=17.0 * token,
        output_values=token,
        parameterless_flop=4.0 * token * sequence,
    )
    embedding = LayerCounts(
        "embedding", (vocabulary + sequence) * hidden, flop=0.0, saved_values=token, output_values=token
    )
    head = LayerCounts(
        "head",
        vocabulary * hidden,
        flop=2.0 * token * vocabulary,
        saved_values=token + float(sequence) * vocabulary,
        output_values=float(sequence),
    )
    return (embedding, *[block] * layers, head)


# Convolutions


class _ConvNetBuilder:
    """Builds the layers of a convolutional network one by one and tracks the image size between them."""

    def __init__(self, size: int, channels: int = 3) -> None:
        self.size, self.channels = size, channels
        self.layers: list[LayerCounts] = []

    @property
    def output_values(self) -> int:
        return self.size * self.size * self.channels

    def conv(self, out: int, kernel: int, stride: int = 1, padding: int | None = None) -> tuple[int, float, float]:
        """Parameters, FLOP and output values of a convolution. Updates the image size and channels."""
        weights = kernel * kernel * self.channels * out
        pad = kernel // 2 if padding is None else padding
        self.size = (self.size + 2 * pad - kernel) // stride + 1
        self.channels = out
        return weights + out, 2.0 * weights * self.size * self.size, float(self.output_values)

    def layer(self, name: str, *convolutions: tuple[int, float, float], norm: bool = False) -> None:
        """Add a layer of several convolutions, each followed by an activation and optionally a norm."""
        parameters, flop, values = (sum(each) for each in zip(*convolutions, strict=True))
        kept = values * (3 if norm else 2)
        self.layers.append(LayerCounts(name, int(parameters), float(flop), float(kept), float(self.output_values)))

    def pool(self, kernel: int = 2, stride: int = 2, padding: int = 0) -> None:
        self.size = (self.size + 2 * padding - kernel) // stride + 1
        self._replace_last_output()

    def _replace_last_output(self) -> None:
        last = self.layers[-1]
        self.layers[-1] = LayerCounts(
            last.name, last.parameters, last.flop, last.saved_values + self.output_values, float(self.output_values)
        )

    def linear(self, name: str, out: int) -> None:
        weights = self.output_values * out
        self.size, self.channels = 1, out
        self.layers.append(LayerCounts(name, weights + out, 2.0 * weights, 2.0 * out, float(out)))


def _vgg19() -> tuple[LayerCounts, ...]:
    net = _ConvNetBuilder(224)
    for stage, (out, many) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))):
        for index in range(many):
            net.layer(f"conv{stage + 1}.{index + 1}", net.conv(out, 3))
        net.pool()
    for name, out in (("fc6", 4096), ("fc7", 4096), ("fc8", 1000)):
        net.linear(name, out)
    return tuple(net.layers)


def _alexnet() -> tuple[LayerCounts, ...]:
    net = _ConvNetBuilder(224)
    net.layer("conv1", net.conv(64, 11, 4, 2))
    net.pool(3, 2)
    net.layer("conv2", net.conv(192, 5))
    net.pool(3, 2)
    for index, out in enumerate((384, 256, 256), 3):
        net.layer(f"conv{index}", net.conv(out, 3))
    net.pool(3, 2)
    for name, out in (("fc6", 4096), ("fc7", 4096), ("fc8", 1000)):
        net.linear(name, out)
    return tuple(net.layers)


def _resnet152() -> tuple[LayerCounts, ...]:
    net = _ConvNetBuilder(224)
    net.layer("stem", net.conv(64, 7, 2), norm=True)
    net.pool(3, 2, 1)
    for stage, (width, many) in enumerate(((64, 3), (128, 8), (256, 36), (512, 3))):
        for index in range(many):
            _bottleneck(net, f"block{stage + 1}.{index + 1}", width, 2 if stage and not index else 1)
    net.pool(net.size, net.size)
    net.linear("fc", 1000)
    return tuple(net.layers)


def _bottleneck(net: _ConvNetBuilder, name: str, width: int, stride: int) -> None:
    before = (net.size, net.channels)
    convolutions = [net.conv(width, 1), net.conv(width, 3, stride), net.conv(4 * width, 1)]
    after = (net.size, net.channels)
    if before[1] != 4 * width:
        net.size, net.channels = before
        convolutions.append(net.conv(4 * width, 1, stride))
        net.size, net.channels = after
    net.layer(name, *convolutions, norm=True)


# Recurrence


def _gnmt(layers: int = 16, hidden: int = 1024, vocabulary: int = 32_000, length: int = 50) -> tuple[LayerCounts, ...]:
    """Half of the LSTMs encode, half decode with attention; sequences pass between layers."""
    token = float(length * hidden)

    def lstm(index: int) -> LayerCounts:
        both = index == 0  # the first LSTM is bidirectional
        wide = 3 if index == 1 or index > layers // 2 else 2  # its input has two directions, or attention is added
        parameters = 4 * hidden * (wide * hidden + 2) * (2 if both else 1)
        return LayerCounts(f"lstm{index + 1}", parameters, 2.0 * parameters * length, 8 * token, 2 * token)

    embedding = LayerCounts("embedding", 2 * vocabulary * hidden, 0.0, 2 * token, 2 * token)
    head = LayerCounts(
        "head", vocabulary * hidden, 2.0 * token * vocabulary, token + length * vocabulary, float(length)
    )
    return (embedding, *(lstm(index) for index in range(layers)), head)


def _gpt3(name: str, layers: int, hidden: int, batch: int) -> ReferenceModel:
    return ReferenceModel(
        name, _transformer(layers, hidden, 2048, 50_257), batch, 1, "sequences of 2,048 tokens", sequence=2048
    )


def decoder_model(name: str, shape: DecoderShape, *, global_batch: int = DEFAULT_GLOBAL_BATCH) -> ReferenceModel:
    """The model of a decoder's shape."""
    note = f"sequences of {shape.sequence:,} tokens{'; ' if shape.assumption else ''}{shape.assumption}"
    model = ReferenceModel(
        name,
        shape.layer_counts(),
        global_batch,
        1,
        note,
        tied_parameters=shape.tied_parameters if shape.tied else 0,
        sequence=shape.sequence,
    )
    experts = f"; {model.active_parameters / 1e9:.3g}B of {model.unique_parameters / 1e9:.4g}B parameters for a token"
    return replace(model, note=note + experts) if shape.experts else model


def _build_models() -> Iterator[ReferenceModel]:
    yield ReferenceModel(
        "bert-large", _transformer(24, 1024, 512, 30_522), 256, 2, "sequences of 512 tokens", sequence=512
    )
    yield ReferenceModel(
        "gpt-2",
        _transformer(48, 1600, 1024, 50_257),
        32,
        4,
        "the largest, 1.5B; sequences of 1,024 tokens",
        sequence=1024,
    )
    yield ReferenceModel(
        "gpt-2-medium", _transformer(24, 1024, 1024, 50_257), 32, 4, "sequences of 1,024 tokens", sequence=1024
    )
    yield _gpt3("gpt-3-125m", 12, 768, 256)
    yield _gpt3("gpt-3-350m", 24, 1024, 256)
    yield _gpt3("gpt-3-760m", 24, 1536, 256)
    yield _gpt3("gpt-3-1.3b", 24, 2048, 512)
    yield _gpt3("gpt-3-2.7b", 32, 2560, 512)
    yield _gpt3("gpt-3-6.7b", 32, 4096, 1024)
    yield _gpt3("gpt-3-13b", 40, 5120, 1024)
    yield _gpt3("gpt-3-175b", 96, 12_288, 1536)
    for name, shape, batch in DECODER_SHAPES:
        yield decoder_model(name, shape, global_batch=batch)
    yield ReferenceModel("resnet-152", _resnet152(), 384, 16, "pictures of 224 x 224")
    yield ReferenceModel("vgg-19", _vgg19(), 384, 8, "pictures of 224 x 224")
    yield ReferenceModel("alexnet", _alexnet(), 576, 8, "pictures of 224 x 224")
    yield ReferenceModel("gnmt-16", _gnmt(), 32, 4, "sentences of 50 tokens")


_LLAMA_SIZES = ("1b", "3b", "8b", "70b", "405b")
_ALIASES = {
    "gpt2": "gpt-2",
    "gpt2-xl": "gpt-2",
    "gpt-3": "gpt-3-175b",
    "gpt3": "gpt-3-175b",
    **{f"llama-3.{minor}-{size}": f"llama-3-{size}" for minor in (1, 2, 3) for size in _LLAMA_SIZES},
    **{f"llama3-{size}": f"llama-3-{size}" for size in _LLAMA_SIZES},
    "mixtral": "mixtral-8x7b",
    "mistral": "mistral-7b",
}

REFERENCE_MODELS = {model.name: model for model in _build_models()}


def find_model(name: str) -> ReferenceModel:
    """The model called `name`. Raises PlanError with the nearest known name if there is none."""
    plain = name.strip().lower().replace("_", "-")
    model = REFERENCE_MODELS.get(_ALIASES.get(plain, plain))
    if model is None:
        close = difflib.get_close_matches(plain, REFERENCE_MODELS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}? Else" if close else f"there is {', '.join(REFERENCE_MODELS)};"
        raise PlanError(f"there is no model {name!r}: {hint} give its config.json, or use --profile")
    return model
