"""ResNet as a list of layers: published size, layers that can be cut and moved."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from culm.errors import JobError
from culm.models import resnet


def built(depth: int = 8, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for layer in resnet(depth, width)])


def test_resnet_20_has_the_published_size() -> None:
    # 269,722 in the paper, whose shortcuts have no parameters; ours add a convolution and a norm in two places.
    model = built(20)
    assert len(model) == 11
    assert sum(p.numel() for p in model.parameters()) == 269_722 + (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)


@pytest.mark.parametrize("depth", [8, 14])
def test_images_become_logits_through_halved_resolutions(depth: int) -> None:
    x = torch.randn(2, 3, 32, 32)
    shapes = [tuple((x := layer(x)).shape) for layer in built(depth, width=4)]
    assert shapes[0] == (2, 4, 32, 32)
    assert shapes[-2] == (2, 16, 8, 8)
    assert shapes[-1] == (2, 10)


def test_a_layer_does_not_change_its_input() -> None:
    x = torch.randn(2, 3, 16, 16)
    for layer in built(width=4):
        kept = x.clone()
        out = layer(x)
        assert torch.equal(x, kept)
        x = out.detach()


def test_every_parameter_gets_a_gradient() -> None:
    model = built(width=4)
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_factories_are_pickled_by_reference() -> None:
    layers = resnet(110)
    assert len(pickle.dumps(layers)) < 10_000
    assert len(pickle.loads(pickle.dumps(layers))) == 56


@pytest.mark.parametrize(("depth", "nearest"), [(18, 20), (2, 8), (0, 8), (50, 50), (21, 20)])
def test_a_depth_that_does_not_exist_names_the_nearest(depth: int, nearest: int) -> None:
    if depth == nearest:
        assert len(resnet(depth)) == 26
        return
    with pytest.raises(JobError, match=f"there is no ResNet of depth {depth}: use 6n \\+ 2, for example {nearest}$"):
        resnet(depth)
