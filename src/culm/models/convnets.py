"""ResNet-152, VGG-19 and AlexNet for large images as lists of layers.

The architectures are those of torchvision. No activation is computed in place, so the lists can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

ImageLayers = list[Callable[[], nn.Module]]


def resnet152(*, width: int = 64, depths: Sequence[int] = (3, 8, 36, 3), classes: int = 1000) -> ImageLayers:
    """The layers of ResNet-152 (He et al. 2015): ImageStem, Bottleneck x 50, ClassifyImage. `depths`: blocks of each
    group; a further group has twice the channels and half the resolution."""
    layers: ImageLayers = [partial(ImageStem, width)]
    inputs = width
    for group, depth in enumerate(depths):
        inner = width * 2**group
        for block in range(depth):
            layers.append(partial(Bottleneck, inputs, inner, 2 if group and not block else 1))
            inputs = 4 * inner
    return [*layers, partial(ClassifyImage, inputs, classes)]


class ImageStem(nn.Module):
    """Images (batch, 3, height, width) -> feature maps of a quarter of the resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(relu(self.norm(self.conv(x))))
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions added to the input."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.norm1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        changes = stride != 1 or inputs != outputs
        shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        self.shortcut: nn.Module = nn.Sequential(shortcut, nn.BatchNorm2d(outputs)) if changes else nn.Identity()
        for conv in (self.conv1, self.conv2, self.conv3):
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))
        y = relu(self.norm2(self.conv2(y)))
        return relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ClassifyImage(nn.Module):
    """Mean over the image, then logits (batch, classes)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mean(dim=(2, 3)))
        return out


def vgg19(*, width: int = 64, hidden: int = 4096, classes: int = 1000, grid: int = 7) -> ImageLayers:
    """The layers of VGG-19 (Simonyan and Zisserman 2014): 16 convolutions and 3 linear layers."""
    layers: ImageLayers = []
    inputs = 3
    for factor, count in [(1, 2), (2, 2), (4, 4), (8, 4), (8, 4)]:
        for number in range(count):
            pools = number == count - 1
            layers.append(partial(ConvRelu, inputs, factor * width, 3, padding=1, pool=2 if pools else 0, stride=1))
            inputs = factor * width
    return [*layers, *_classifier(inputs, grid, hidden, classes, drops_first=False)]


def alexnet(*, width: int = 64, hidden: int = 4096, classes: int = 1000, grid: int = 6) -> ImageLayers:
    """The layers of AlexNet (Krizhevsky 2014, one tower): 5 convolutions and 3 linear layers."""
    convs = [
        partial(ConvRelu, 3, width, 11, stride=4, padding=2, pool=3),
        partial(ConvRelu, width, 3 * width, 5, stride=1, padding=2, pool=3),
        partial(ConvRelu, 3 * width, 6 * width, 3, stride=1, padding=1, pool=0),
        partial(ConvRelu, 6 * width, 4 * width, 3, stride=1, padding=1, pool=0),
        partial(ConvRelu, 4 * width, 4 * width, 3, stride=1, padding=1, pool=3),
    ]
    return [*convs, *_classifier(4 * width, grid, hidden, classes, drops_first=True)]


class ConvRelu(nn.Module):
    """A convolution, ReLU and, if `pool` is above 0, max pooling by 2 with a window of that size."""

    def __init__(self, inputs: int, outputs: int, size: int, *, stride: int, padding: int, pool: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=padding)
        self.pool: nn.Module = nn.MaxPool2d(pool, stride=2) if pool else nn.Identity()
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(relu(self.conv(x)))
        return out


class FlattenGrid(nn.Module):
    """Feature maps -> (batch, channels * grid * grid), averaged to that grid."""

    def __init__(self, grid: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d((grid, grid))

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(self.pool(x), 1)


class LinearRelu(nn.Module):
    """A linear layer, ReLU and dropout, which comes before or after them."""

    def __init__(self, inputs: int, outputs: int, *, drops_first: bool) -> None:
        super().__init__()
        self.linear, self.dropout, self.drops_first = nn.Linear(inputs, outputs), nn.Dropout(0.5), drops_first

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = relu(self.linear(self.dropout(x))) if self.drops_first else self.dropout(relu(self.linear(x)))
        return out


def _classifier(channels: int, grid: int, hidden: int, classes: int, *, drops_first: bool) -> ImageLayers:
    return [
        partial(FlattenGrid, grid),
        partial(LinearRelu, channels * grid * grid, hidden, drops_first=drops_first),
        partial(LinearRelu, hidden, hidden, drops_first=drops_first),
        partial(nn.Linear, hidden, classes),
    ]
