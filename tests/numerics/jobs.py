"""Small jobs, each with one thing that could go wrong. Everything is at module level, so that it pickles by name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from culm.job import Job
from culm.models.gpt import gpt, gpt_loss, gpt_tied
from culm.runtime import statistics

from . import elsewhere, quiet

WIDTH = 6


class Points:
    """`count` points of a shape with a target: item i is a function of i alone."""

    def __init__(self, *shape: int, count: int = 23, classes: int = 3) -> None:
        self.shape, self.count, self.classes = shape or (WIDTH,), count, classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(*self.shape, generator=draw), index % self.classes


class Tokens:
    """Sequences of tokens and the tokens that follow."""

    def __init__(self, length: int = 5, vocab: int = 7, count: int = 23) -> None:
        self.length, self.vocab, self.count = length, vocab, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocab, (self.length + 1,), generator=draw)
        return ids[:-1], ids[1:]


class Noisy(Points):
    """Draws from all three generators that a data set may use."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point, label = super().__getitem__(index)
        return point + torch.randn(1) + np.random.uniform() + random.random(), label


class Ragged(Tokens):
    """Sequences of different lengths, padded by `pad`."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids, following = super().__getitem__(index)
        return ids[: 2 + index % 4], following[: 2 + index % 4]


class Labelled(NamedTuple):
    """A target with names."""

    label: Tensor
    weight: Tensor


class Named(Points):
    """The target is a named tuple."""

    def __getitem__(self, index: int) -> Any:
        point, label = super().__getitem__(index)
        return point, Labelled(torch.tensor(label), torch.tensor(1.0 + index % 3))


def pad(items: list[Any]) -> Any:
    """To the longest of the micro-batch; padding has the target -1."""
    inputs, targets = zip(*items, strict=True)
    rows = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return rows(list(inputs)), rows(list(targets), padding_value=-1.0)


def jitter(items: list[Any]) -> Any:
    """A collation that draws, too."""
    inputs, labels = torch.utils.data.default_collate(items)
    return inputs * (1 + 0.1 * torch.rand(1)) + np.random.normal() + random.random(), labels


def halves(items: list[Any]) -> Any:
    """Two inputs: the points, and an integer mask that travels along."""
    inputs, labels = torch.utils.data.default_collate(items)
    return (inputs, (inputs > 0).long()), labels


def mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target)


def over_tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, weight): tokens that are not padding."""
    loss = functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum")
    return loss, (target >= 0).sum()


def by_label(output: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """(sum, weight) with a float that differs by micro-batch."""
    return functional.cross_entropy(output, target, reduction="sum"), 0.1 + 0.7 * float(target.sum())


def by_name(output: Tensor, target: Labelled) -> tuple[Tensor, Tensor]:
    each = functional.cross_entropy(output, target.label, reduction="none")
    return (each * target.weight).sum(), target.weight.sum()


def drawing(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws from all three generators."""
    noise = 0.1 * torch.randn_like(output) * random.random() * np.random.uniform()
    return functional.cross_entropy(output + noise, target)


def in_place(output: Tensor, target: Tensor) -> Tensor:
    """A loss that writes into what it is given."""
    return functional.cross_entropy(output.mul_(0.5), target)


def of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The last layer gives a tuple."""
    return functional.cross_entropy(output[0], target) + 0.1 * output[1].pow(2).mean()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def warm(step: int) -> float:
    return (step + 1) / 3


class Dense(nn.Module):
    """Linear and tanh: the plainest layer."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(torch.tanh(self.linear(x)))
        return out


class Frozen(Dense):
    """A layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class HalfFrozen(Dense):
    """A layer of which one parameter does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.bias.requires_grad_(False)


class Twice(nn.Module):
    """One weight at three places, two of them with a bias of their own, a norm between: awkward to split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.first, self.second = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(functional.linear(x, self.weight, self.first))
        y = torch.tanh(functional.linear(y, self.weight, self.second))
        return x + y @ self.weight


class Shared(nn.Module):
    """Two names for one parameter inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Probe(nn.Module):
    """Lets no gradient through, yet trains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.detach())
        return out


class Residual(nn.Module):
    """Uses its input at several places."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.sigmoid(self.gate(x)) * self.value(x) - 0.1 * x
        return out


class Normed(nn.Module):
    """Batch norm in the middle."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.norm(self.linear(x)))
        return out


class NormedTwice(Normed):
    """One batch norm, called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x))


class Stochastic(Normed):
    """Stochastic depth: some micro-batches pass by, batch norm and all."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else super().forward(x)


class Chance(Dense):
    """Draws from `random` and numpy in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random() + np.random.uniform(0.5, 1.0)


class Tracked(nn.Module):
    """A moving buffer of its own: the largest input so far, and how often it was looked at."""

    largest: Tensor
    looks: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.zeros(WIDTH))
        self.register_buffer("looks", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            statistics.record(self, x.abs().amax(0), torch.tensor(len(x)))
        out: Tensor = self.linear(x / (1 + self.largest))
        return out

    def apply_statistics(self, largest: Tensor, looks: Tensor) -> None:
        torch.maximum(self.largest, largest, out=self.largest)
        self.looks += looks


class Branch(nn.Module):
    """Starts a tuple: (features, skip, mask). The skip is used by layers further on; the mask never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return torch.tanh(y), y, mask


class Along(nn.Module):
    """Uses skip and mask, and hands both on untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x) + skip * mask), skip, mask


class Ahead(nn.Module):
    """Uses no skip, hands a float without gradient on, and an output that nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        x, skip, mask = values
        return [self.linear(x), skip, mask, (x > 0).float(), self.spare(x)]


class Merge(nn.Module):
    """Ends the tuple, reading the skip a last time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor, sign: Tensor, unused: Tensor) -> Tensor:
        del unused
        out: Tensor = self.linear(x * (1 + mask) + skip * sign)
        return out


class Doubled(nn.Module):
    """The same tensor at two places of the tuple."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Added(Dense):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + y


class Tripled(nn.Module):
    """One tensor at three places: the order of their gradients shows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x, x


class Weighed(nn.Module):
    """Uses three tensors differently, and one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.a(x)) + torch.sigmoid(self.b(y)) * self.c(z) + x * y
        return out


class Stray(nn.Module):
    """An output that depends on a parameter alone: no input reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.prompt = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) * self.prompt, torch.tanh(self.prompt).expand_as(x)


class Ignoring(nn.Module):
    """A learned table that does not look at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.table).expand(x.shape)


class Sometimes(nn.Module):
    """One of its two parameters has a gradient, as the data has it; one has none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x) if float(x.detach().sum()) > 0 else self.right(x)
        return torch.tanh(out)


class Rectified(nn.Module):
    """Writes into its input first of all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.mul_(0.9).add_(0.1).relu_())
        return out


class Transposed(nn.Module):
    """(batch, length, width) -> (batch, width, length): ends in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).transpose(1, 2)
        return out


class Flat(nn.Module):
    """(batch, ...) -> (batch, width): a reshape, then a slice."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(len(x), -1)).view(len(x), 2, WIDTH)[:, 1]  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """An LSTM: the output alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cell(x)[0]
        return out


class Attending(nn.Module):
    """nn.MultiheadAttention on itself, post norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.attention(x, x, x)[0])
        return out


class Pooled(nn.Module):
    """A sum over positions: its gradient is one row, repeated without memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class Spectrum(nn.Module):
    """Complex numbers leave this layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.rfft(self.linear(x))
        return out


class Signal(nn.Module):
    """... and come back here."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.fft.irfft(x, n=WIDTH))
        return out


class Words(nn.Module):
    """An embedding."""

    def __init__(self, vocab: int = 7, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, WIDTH, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids)
        return out


class Mixed(nn.Module):
    """Goes through a table of the embedding's shape in the middle of the model."""

    def __init__(self, vocab: int = 7) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + torch.softmax(x @ self.table.T, -1) @ self.table


class Speak(nn.Module):
    """Logits over the vocabulary."""

    def __init__(self, vocab: int = 7) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out


class Affine(nn.Module):
    """A scale for each channel and a shift for each position: their gradients are sums over all the rest."""

    def __init__(self, length: int = 4) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(length, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Across(nn.Module):
    """Mixes positions: turns its input round first, and its output back."""

    def __init__(self, length: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(length, length)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.transpose(1, 2)).transpose(1, 2)
        return out


class Repeated(nn.Module):
    """One row for all positions, without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum(1, keepdim=True).expand(x.shape)


class Sliced(nn.Module):
    """Every other column of twice as many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)[..., ::2]
        return out


class Permuted(nn.Module):
    """Dimensions in another order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("blw,wv->vlb", x, self.weight).permute(2, 1, 0)


class PostNorm(nn.Module):
    """Ends in full precision under autocast, and begins with three casts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x)
        out: Tensor = self.norm(x + mixed)
        return out


class NormedAcross(nn.Module):
    """Batch norm over channels that come last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return out


class Forked(nn.Module):
    """Goes one of two ways, as the data has it; only one of them turns its input round, or draws."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.along = nn.Linear(4, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach()[0, 0, 0]) > 0:
            return self.across(x.transpose(1, 2)).transpose(1, 2) * elsewhere.draw()  # type: ignore[no-any-return]
        out: Tensor = self.along(x)
        return out


class Shifted(nn.Module):
    """One number for all: its gradient is a sum over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift)


class EachPosition(nn.Module):
    """Classes come second, as cross entropy wants them."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).transpose(1, 2)
        return out


def at_each_position(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target[:, None].expand(-1, output.shape[2]))


def dense(count: int = 5, *, dropout: float = 0.0, classes: int = 3) -> list[Callable[[], nn.Module]]:
    """Layers of equal width, and one to the classes."""
    return [*[partial(Dense, dropout=dropout)] * (count - 1), partial(Dense, WIDTH, classes)]


plain = Job(
    layers=dense(),
    loss=mean,
    optimizer=adamw,
    data=Points(),
    global_batch=10,
    micro_batch=2,
    steps=2,
    seed=5,
    device="cpu",
)
"""Five layers, M = 5: no number of pipelines or stages divides it."""


def but(base: Job = plain, **changes: Any) -> Job:
    """A job that differs in some fields."""
    return dataclasses.replace(base, **changes)


def around(*middle: Callable[[], nn.Module], **changes: Any) -> Job:
    """Layers between two plain ones."""
    return but(layers=[Dense, *middle, partial(Dense, WIDTH, 3)], **changes)


words = but(
    layers=[Words, Dense, partial(Dense, dropout=0.2), Speak],
    loss=over_tokens,
    data=Ragged(),
    collate=pad,
    optimizer=sgd,
)
sequences = but(data=Points(4, WIDTH))
gpt_layers: Sequence[Callable[[], nn.Module]] = gpt("nano", width=8, heads=2, blocks=3, context=5, vocab=7, dropout=0.1)
tiny_gpt = but(layers=gpt_layers, loss=gpt_loss, data=Tokens(), clip_norm=0.5, lr_schedule=warm)

everything = but(
    words,
    layers=[Words, partial(Dense, dropout=0.2), NormedAcross, Residual, partial(Dense, dropout=0.2), Speak],
    tied=[("0.table.weight", "5.head.weight")],
    clip_norm=0.2,
    lr_schedule=warm,
)
"""Tied, clipped, scheduled, weighted, with dropout, batch norm and sequences of all lengths."""

forked = but(
    sequences,
    layers=[Dense, Shifted, Forked, Shifted, Forked, EachPosition],
    loss=at_each_position,
    global_batch=16,
    steps=3,
    exact=True,
)

JOBS: Mapping[str, Job] = MappingProxyType(
    {
        "plain": plain,
        "clipped": but(clip_norm=0.05, optimizer=sgd),
        "dropout": but(layers=dense(dropout=0.3), clip_norm=0.1),
        "scheduled": but(lr_schedule=warm, optimizer=sgd),
        "gpt": tiny_gpt,
        "gpt tied": but(tiny_gpt, tied=gpt_tied(gpt_layers)),
        "gpt tied recompute": but(tiny_gpt, tied=gpt_tied(gpt_layers), recompute=True),
        "gpt bf16": but(tiny_gpt, precision="bf16"),
        "gpt bf16 recompute": but(tiny_gpt, precision="bf16", recompute=True),
        "tied three": but(
            words, layers=[Words, Mixed, Dense, Speak], tied=[("0.table.weight", "1.table", "3.head.weight")]
        ),
        "tied inside a layer": around(Twice, tied=[("1.first", "1.second")]),
        "tied and shared": around(Shared, Dense, tied=[("1.up.weight", "2.linear.weight")]),
        "bf16": around(Residual, Residual, precision="bf16"),
        "bf16 recompute": around(Residual, Residual, precision="bf16", recompute=True),
        "recompute": but(layers=dense(dropout=0.3), recompute=True),
        "batch norm": around(Normed, partial(Normed, None), global_batch=15, micro_batch=3),
        "batch norm recompute": around(Normed, Normed, global_batch=15, micro_batch=3, recompute=True),
        "batch norm twice": around(NormedTwice, partial(NormedTwice, None), global_batch=15, micro_batch=3),
        "stochastic depth": around(Stochastic, partial(Stochastic, None), global_batch=15, micro_batch=3),
        "own statistics": around(Tracked, Tracked),
        "weights as tensors": words,
        "weights as floats": but(loss=by_label, clip_norm=0.1),
        "named target": but(data=Named(), loss=by_name),
        "random data": but(data=Noisy(), collate=jitter),
        "random layers": around(Chance, Chance),
        "random layers recompute": around(Chance, Chance, recompute=True),
        "random layers, quietly": around(partial(quiet.Chance, WIDTH, WIDTH), partial(quiet.Steady, WIDTH, WIDTH)),
        "random loss, quietly": but(layers=[partial(quiet.Steady, WIDTH, WIDTH)] * 3, loss=quiet.loss),
        "random loss": but(loss=drawing, layers=dense(dropout=0.2)),
        "tuples": but(layers=[Branch, Along, Along, Ahead, Merge], collate=halves, data=Points(classes=WIDTH)),
        "tuples recompute": but(
            layers=[Branch, Along, Along, Ahead, Merge], collate=halves, data=Points(classes=WIDTH), recompute=True
        ),
        "tuple to the loss": around(Doubled, Added, Doubled, Added, Dense, loss=mean),
        "doubled": but(layers=[Dense, Doubled, Added, Doubled, Added, Dense, Doubled], loss=of_two),
        "tripled": around(Tripled, Weighed, Dense, Tripled, Weighed),
        "stray": but(layers=[Dense, Stray, Added, Stray, Added, partial(Dense, WIDTH, 3)]),
        "stray recompute": but(layers=[Dense, Stray, Added, Stray, Added, partial(Dense, WIDTH, 3)], recompute=True),
        "ignoring": around(Ignoring, Dense),
        "probe": around(Probe, Dense),
        "one weight twice": around(Twice, Shared),
        "frozen start": but(layers=[Frozen, Frozen, *dense(3)]),
        "frozen middle": but(layers=[Dense, Frozen, Frozen, *dense(2)]),
        "frozen end": around(HalfFrozen, Frozen, Frozen, loss=mean),
        "all but the head frozen": but(layers=[Frozen, Frozen, Frozen, partial(Dense, WIDTH, 3)]),
        "frozen end of all": but(layers=[Dense, Dense, Frozen, Frozen], data=Points(classes=WIDTH)),
        "sometimes": around(Sometimes, Sometimes),
        "in place": around(Rectified, partial(nn.ReLU, inplace=True), Rectified),
        "in place recompute": around(Rectified, partial(nn.Dropout, 0.3, inplace=True), Rectified, recompute=True),
        "in place first": but(layers=[Rectified, partial(nn.ReLU, inplace=True), *dense(2)], recompute=True),
        "in place loss": but(loss=in_place),
        "in place loss recompute": but(loss=in_place, recompute=True),
        "views": but(sequences, layers=[Dense, Transposed, partial(nn.Linear, 4, 5), partial(Flat, 30), Dense]),
        "attention": but(sequences, layers=[Attending, Recurrent, Attending, Pooled, Dense]),
        "attention bf16": but(sequences, layers=[Attending, Dense, Attending, Pooled, Dense], precision="bf16"),
        "pooled": but(sequences, layers=[Dense, partial(nn.Linear, WIDTH, WIDTH), Pooled, Residual, Dense]),
        "complex": around(Spectrum, Signal),
        "complex recompute": around(Spectrum, Signal, recompute=True),
        "sparse": but(words, layers=[partial(Words, sparse=True), Dense, Speak]),
        "bf16 after a norm": but(
            sequences, layers=[PostNorm, PostNorm, PostNorm, EachPosition], loss=at_each_position, precision="bf16"
        ),
        "everything": everything,
    }
)
"""By name: every run of each of them must equal the reference."""

ZOO: Sequence[Callable[[], nn.Module]] = (
    Affine, Across, Repeated, Sliced, Permuted, PostNorm, NormedAcross, Dense, partial(Dense, dropout=0.3), Twice,
    Shared, Residual, Recurrent, Attending, Chance, Rectified, partial(nn.ReLU, inplace=True), Probe, Frozen, Ignoring,
    partial(nn.LayerNorm, WIDTH), nn.Identity,
)  # fmt: skip


def stack(seed: int) -> Job:
    """Layers of the zoo in a random order, as a job with random settings."""
    draw = random.Random(seed)
    return but(
        layers=[Dense, *(draw.choice(ZOO) for _ in range(draw.randint(3, 6))), EachPosition],
        loss=at_each_position,
        data=Points(4, WIDTH),
        optimizer=draw.choice([adamw, sgd]),
        global_batch=6,
        steps=2,
        seed=seed,
        precision=draw.choice(["fp32", "fp32", "bf16"]),
        recompute=draw.random() < 0.25,
        exact=draw.random() < 0.5,
        clip_norm=draw.choice([None, 1.0]),
    )
