"""ResNet for small images (He et al. 2015, section 4.2) as a list of layers: Stem, Residual x 3n, Classify.

A layer takes and returns one tensor and changes nothing in place, so the list can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import relu

from culm.errors import JobError


def resnet(depth: int = 8, width: int = 16, classes: int = 10) -> list[Callable[[], nn.Module]]:
    """The layers of a ResNet with 6n + 2 convolutions and linear layers: depth 8, 14, 20, 32, 44, 56, 110.

    Three groups of n residual layers; each further group has twice the channels and half the resolution.
    The factories can be pickled by reference. Raises JobError for a depth that is not 6n + 2.
    """
    if depth < 8 or (depth - 2) % 6:
        nearest = 6 * max(1, round((depth - 2) / 6)) + 2
        raise JobError(f"there is no ResNet of depth {depth}: use 6n + 2, for example {nearest}")
    widths = [width * 2**group for group in range(3) for _ in range((depth - 2) // 6)]
    residuals = [partial(Residual, i, o) for i, o in zip([width, *widths], widths, strict=False)]
    return [partial(Stem, width), *residuals, partial(Classify, widths[-1], classes)]


class Stem(nn.Module):
    """Images (batch, 3, height, width) -> feature maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = _conv(3, width)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return relu(self.norm(self.conv(x)))


class Residual(nn.Module):
    """Two convolutions added to the input; if the number of channels grows, the resolution halves."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = _conv(inputs, outputs, stride=stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv(outputs, outputs)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return relu(y + self.shortcut(x))


class Classify(nn.Module):
    """Mean over the image, then logits (batch, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out


def _conv(inputs: int, outputs: int, *, stride: int = 1) -> nn.Conv2d:
    """3x3 without a bias: the batch norm that follows has one."""
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight)
    return conv


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
