"""Well-known models as layers, with parameters, FLOP and bytes counted: profiles of what one can not run here.

transformer   BERT-Large, GPT-2, GPT-3 from 125M to 175B
convolution   ResNet-152, VGG-19, AlexNet
recurrence    GNMT-16
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from culm.errors import PlanError
from culm.plan.instances import EFFICIENCY, LAUNCH_S, STREAMING, Device
from culm.plan.profile import LayerCost, Profile

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Part:
    """A layer, for one sample. Numbers of values, not of bytes."""

    name: str
    parameters: int
    flop: float
    """Forward, in products with parameters: each half of the backward has as many."""
    kept: float
    """Values kept for the backward."""
    output: float
    """Values that go to the next layer."""
    extra_flop: float = 0.0
    """Forward, in products without parameters (attention): the backward has twice as many, all in I."""


@dataclass(frozen=True)
class Model:
    """A model by name, with the batch that it is usually trained with."""

    name: str
    parts: tuple[Part, ...]
    batch: int
    micro_batch: int
    note: str = ""

    @cached_property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @cached_property
    def flop(self) -> float:
        """Of a sample, forward and backward."""
        return sum(3 * (part.flop + part.extra_flop) for part in self.parts)

    def profile(self, device: Device, micro_batch: int, *, precision: str = "fp32", recompute: bool = False) -> Profile:
        """What each layer costs there, estimated from its counts and the device's figures.

        Raises PlanError for a precision that is not known.
        """
        if precision not in PRECISIONS:
            raise PlanError(f"precision is {precision!r}: use one of {', '.join(PRECISIONS)}")
        layers = tuple(_cost(part, device, micro_batch, precision, recompute) for part in self.parts)
        words = f"{device.name}, {precision}{', recompute' if recompute else ''}"
        return Profile(layers=layers, device=words, micro_batch=micro_batch, threads=1, source="estimated")


def _cost(part: Part, device: Device, micro_batch: int, precision: str, recompute: bool) -> LayerCost:
    """Time is what products take at their share of the peak, or what the bytes take that have to be moved."""
    wide = 2 if precision == "bf16" else 4
    values = part.parameters + micro_batch * (part.kept + part.output)
    moved_s = values * wide / (STREAMING * device.bandwidth)

    def spent(flop: float) -> float:
        return LAUNCH_S + max(micro_batch * flop / (EFFICIENCY[precision] * device.peak(precision)), moved_s)

    forward = spent(part.flop + part.extra_flop)
    kept = part.output if recompute else part.kept
    return LayerCost(
        name=part.name,
        forward_s=forward,
        input_s=spent(part.flop + 2 * part.extra_flop) + (forward if recompute else 0.0),
        weight_s=spent(part.flop) if part.parameters else 0.0,
        # Parameters stay in fp32, beside their gradients and two moments of Adam.
        parameter_bytes=4 * part.parameters,
        state_bytes=12 * part.parameters,
        activation_bytes=round(micro_batch * kept * wide),
        output_bytes=round(micro_batch * part.output * wide),
        step_s=28 * part.parameters / (STREAMING * device.bandwidth),
    )


# Transformers


def _transformer(layers: int, hidden: int, sequence: int, vocabulary: int) -> tuple[Part, ...]:
    """Embedding, blocks, head. A block has 12 h^2 parameters, and keeps 34 bytes in 16 bit for each token and channel
    (Korthikanti et al., 2022, with fused attention). Embedding and head are counted both, tied or not: both hold it."""
    token = sequence * hidden
    block = Part(
        "block",
        parameters=12 * hidden * hidden + 13 * hidden,
        flop=24.0 * token * hidden,
        kept=17.0 * token,
        output=token,
        extra_flop=4.0 * token * sequence,
    )
    embedding = Part("embedding", (vocabulary + sequence) * hidden, flop=0.0, kept=token, output=token)
    head = Part(
        "head",
        vocabulary * hidden,
        flop=2.0 * token * vocabulary,
        kept=token + float(sequence) * vocabulary,
        output=float(sequence),
    )
    return (embedding, *[block] * layers, head)


# Convolutions


class _Image:
    """Layers of a convolutional network, one by one, with the size of the picture between them."""

    def __init__(self, size: int, channels: int = 3) -> None:
        self.size, self.channels = size, channels
        self.parts: list[Part] = []

    @property
    def values(self) -> int:
        return self.size * self.size * self.channels

    def conv(self, out: int, kernel: int, stride: int = 1, padding: int | None = None) -> tuple[int, float, float]:
        """Parameters, FLOP and values of a convolution; the picture is what comes out of it."""
        weights = kernel * kernel * self.channels * out
        pad = kernel // 2 if padding is None else padding
        self.size = (self.size + 2 * pad - kernel) // stride + 1
        self.channels = out
        return weights + out, 2.0 * weights * self.size * self.size, float(self.values)

    def layer(self, name: str, *convolutions: tuple[int, float, float], norm: bool = False) -> None:
        """A layer of some convolutions, each followed by an activation and, where there is one, a norm."""
        parameters, flop, values = (sum(each) for each in zip(*convolutions, strict=True))
        kept = values * (3 if norm else 2)
        self.parts.append(Part(name, int(parameters), float(flop), float(kept), float(self.values)))

    def pool(self, kernel: int = 2, stride: int = 2, padding: int = 0) -> None:
        self.size = (self.size + 2 * padding - kernel) // stride + 1
        self._shrink_output()

    def _shrink_output(self) -> None:
        last = self.parts[-1]
        self.parts[-1] = Part(last.name, last.parameters, last.flop, last.kept + self.values, float(self.values))

    def linear(self, name: str, out: int) -> None:
        weights = self.values * out
        self.size, self.channels = 1, out
        self.parts.append(Part(name, weights + out, 2.0 * weights, 2.0 * out, float(out)))


def _vgg19() -> tuple[Part, ...]:
    net = _Image(224)
    for stage, (out, many) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))):
        for index in range(many):
            net.layer(f"conv{stage + 1}.{index + 1}", net.conv(out, 3))
        net.pool()
    for name, out in (("fc6", 4096), ("fc7", 4096), ("fc8", 1000)):
        net.linear(name, out)
    return tuple(net.parts)


def _alexnet() -> tuple[Part, ...]:
    net = _Image(224)
    net.layer("conv1", net.conv(64, 11, 4, 2))
    net.pool(3, 2)
    net.layer("conv2", net.conv(192, 5))
    net.pool(3, 2)
    for index, out in enumerate((384, 256, 256), 3):
        net.layer(f"conv{index}", net.conv(out, 3))
    net.pool(3, 2)
    for name, out in (("fc6", 4096), ("fc7", 4096), ("fc8", 1000)):
        net.linear(name, out)
    return tuple(net.parts)


def _resnet152() -> tuple[Part, ...]:
    net = _Image(224)
    net.layer("stem", net.conv(64, 7, 2), norm=True)
    net.pool(3, 2, 1)
    for stage, (width, many) in enumerate(((64, 3), (128, 8), (256, 36), (512, 3))):
        for index in range(many):
            _bottleneck(net, f"block{stage + 1}.{index + 1}", width, 2 if stage and not index else 1)
    net.pool(net.size, net.size)
    net.linear("fc", 1000)
    return tuple(net.parts)


def _bottleneck(net: _Image, name: str, width: int, stride: int) -> None:
    before = (net.size, net.channels)
    convolutions = [net.conv(width, 1), net.conv(width, 3, stride), net.conv(4 * width, 1)]
    after = (net.size, net.channels)
    if before[1] != 4 * width:
        net.size, net.channels = before
        convolutions.append(net.conv(4 * width, 1, stride))
        net.size, net.channels = after
    net.layer(name, *convolutions, norm=True)


# Recurrence


def _gnmt(layers: int = 16, hidden: int = 1024, vocabulary: int = 32_000, length: int = 50) -> tuple[Part, ...]:
    """Half of the LSTMs read, half write with attention; what passes between layers are sequences."""
    token = float(length * hidden)

    def lstm(index: int) -> Part:
        both = index == 0  # the first one reads in both directions
        wide = 3 if index == 1 or index > layers // 2 else 2  # two directions before it, or attention beside it
        parameters = 4 * hidden * (wide * hidden + 2) * (2 if both else 1)
        return Part(f"lstm{index + 1}", parameters, 2.0 * parameters * length, 8 * token, 2 * token)

    embedding = Part("embedding", 2 * vocabulary * hidden, 0.0, 2 * token, 2 * token)
    head = Part("head", vocabulary * hidden, 2.0 * token * vocabulary, token + length * vocabulary, float(length))
    return (embedding, *(lstm(index) for index in range(layers)), head)


def _gpt3(name: str, layers: int, hidden: int, batch: int) -> Model:
    return Model(name, _transformer(layers, hidden, 2048, 50_257), batch, 1, "sequences of 2,048 tokens")


def _models() -> Iterator[Model]:
    yield Model("bert-large", _transformer(24, 1024, 512, 30_522), 256, 2, "sequences of 512 tokens")
    yield Model("gpt-2", _transformer(48, 1600, 1024, 50_257), 32, 4, "the largest, 1.5B; sequences of 1,024 tokens")
    yield Model("gpt-2-medium", _transformer(24, 1024, 1024, 50_257), 32, 4, "sequences of 1,024 tokens")
    yield _gpt3("gpt-3-125m", 12, 768, 256)
    yield _gpt3("gpt-3-350m", 24, 1024, 256)
    yield _gpt3("gpt-3-760m", 24, 1536, 256)
    yield _gpt3("gpt-3-1.3b", 24, 2048, 512)
    yield _gpt3("gpt-3-2.7b", 32, 2560, 512)
    yield _gpt3("gpt-3-6.7b", 32, 4096, 1024)
    yield _gpt3("gpt-3-13b", 40, 5120, 1024)
    yield _gpt3("gpt-3-175b", 96, 12_288, 1536)
    yield Model("resnet-152", _resnet152(), 384, 16, "pictures of 224 x 224")
    yield Model("vgg-19", _vgg19(), 384, 8, "pictures of 224 x 224")
    yield Model("alexnet", _alexnet(), 576, 8, "pictures of 224 x 224")
    yield Model("gnmt-16", _gnmt(), 32, 4, "sentences of 50 tokens")


MODELS = {made.name: made for made in _models()}


def model(name: str) -> Model:
    """The model of that name. Raises PlanError, with the nearest, for one that is not known."""
    plain = name.strip().lower().replace("_", "-")
    aliases = {"gpt2": "gpt-2", "gpt2-xl": "gpt-2", "gpt-3": "gpt-3-175b", "gpt3": "gpt-3-175b"}
    found = MODELS.get(aliases.get(plain, plain))
    if found is None:
        close = difflib.get_close_matches(plain, MODELS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(MODELS)}"
        raise PlanError(f"there is no model {name!r}: {hint}; others come with --profile")
    return found
