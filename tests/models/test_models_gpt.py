"""GPT as a list of layers: published sizes, causal attention, layers that can be cut and moved."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

from culm.errors import JobError
from culm.models import SIZES, GPTConfig, gpt, gpt_config, gpt_loss, gpt_tied


def built(size: str = "nano", **overrides: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer() for layer in gpt(size, **overrides)])


def tokens(*shape: int, vocab: int = 128) -> torch.Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("size", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt3-1.3b", 1.3e9),
        ("gpt3-2.7b", 2.7e9),
        ("gpt3-6.7b", 6.7e9),
        ("gpt3-13b", 13e9),
        ("gpt3-175b", 175e9),
    ],
)
def test_the_number_of_parameters_is_the_published_one(size: str, published: float) -> None:
    # The sizes of GPT-3 are published with two or three digits only.
    assert gpt_config(size).parameters == pytest.approx(published, rel=0 if isinstance(published, int) else 0.02)


@pytest.mark.parametrize("size", SIZES)
def test_the_layers_have_the_parameters_that_the_formula_counts(size: str) -> None:
    config, (first, *blocks, last) = gpt_config(size), gpt(size)
    assert len(blocks) == config.blocks
    assert len(set(map(repr, blocks))) == 1, "one stands for all"
    with torch.device("meta"):
        made = [(1, first()), (config.blocks, blocks[0]()), (1, last())]
    total = sum(times * parameter.numel() for times, layer in made for parameter in layer.parameters())
    assert total - config.vocab * config.width == config.parameters


def test_a_small_gpt_learns_a_batch() -> None:
    model, x, y = built(blocks=2), tokens(4, 16), tokens(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = gpt_loss(model(x), y)
    for _ in range(30):
        optimizer.zero_grad()
        gpt_loss(model(x), y).backward()
        optimizer.step()
    assert first.item() == pytest.approx(torch.tensor(128.0).log().item(), abs=0.3)
    assert gpt_loss(model(x), y) < first / 3


def test_the_loss_is_the_mean_over_all_positions() -> None:
    output, target = torch.randn(2, 3, 5), tokens(2, 3, vocab=5)
    each = -output.log_softmax(-1).gather(-1, target.unsqueeze(-1))
    assert torch.allclose(gpt_loss(output, target), each.mean())


def test_no_position_attends_to_later_ones() -> None:
    model, x = built(), tokens(1, 12)
    changed = x.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 128
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_dropout_acts_only_in_training() -> None:
    model, x = built(dropout=0.5), tokens(1, 12)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_a_layer_does_not_change_its_input() -> None:
    x: torch.Tensor = tokens(2, 8)
    for layer in built():
        kept = x.clone()
        out = layer(x)
        assert torch.equal(x, kept)
        x = out.detach()


def test_the_factories_are_pickled_by_reference() -> None:
    layers = gpt("gpt3-175b")
    raw = pickle.dumps(layers)
    assert len(raw) < 10_000
    assert [layer.func for layer in pickle.loads(raw)] == [layer.func for layer in layers]  # type: ignore[attr-defined]


def test_the_tied_names_are_two_weights_of_one_shape() -> None:
    layers = gpt()
    ((first, last),) = gpt_tied(layers)
    weights = dict(built().named_parameters())
    assert weights[first].shape == weights[last].shape == (128, 64)


def test_layers_of_a_deeper_model_add_less_to_the_stream() -> None:
    def spread(blocks: int) -> float:
        return dict(built(blocks=blocks, width=256).named_parameters())["1.mlp.out.weight"].std().item()

    shallow, deep = spread(1), spread(16)
    assert shallow / deep == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(
    ("size", "overrides", "message"),
    [
        ("gpt5", {}, "there is no GPT of size 'gpt5': use one of nano, mini, gpt2, "),
        (
            "nano",
            {"depth": 3},
            "a GPT has no 'depth': use one of width, blocks, heads, context, vocab, dropout",
        ),
        ("nano", {"heads": 5}, "GPTConfig.heads is 5: use a divisor of the width 64"),
        ("nano", {"blocks": 0}, "GPTConfig.blocks is 0: use a whole number of at least 1"),
        ("nano", {"dropout": 1.0}, "GPTConfig.dropout is 1.0: use a number of at least 0 and below 1"),
    ],
)
def test_invalid_gpt_settings_are_refused_with_the_reason(size: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        gpt(size, **overrides)
    assert str(caught.value).startswith(message)


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(JobError, match="the input has 65 tokens, but the GPT's context is 64"):
        built()(tokens(1, 65))


def test_overrides_do_not_change_the_table() -> None:
    assert gpt_config("nano", vocab=65) == GPTConfig(width=64, blocks=4, heads=4, context=64, vocab=65)
    assert SIZES["nano"].vocab == 128
