"""Layers on sequences (batch, length, width) that transpose, slice, expand and permute tensors."""

from __future__ import annotations

import torch
from tests.runtime import hidden_rng
from tests.runtime.sample_data import WIDTH
from torch import Tensor, nn


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
    """A sum over positions: its gradient is one row, expanded without memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class Spectrum(nn.Module):
    """Returns complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.fft.rfft(self.linear(x))
        return out


class Signal(nn.Module):
    """Takes complex numbers and returns real ones."""

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


class Silent(Words):
    """An embedding that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Mixed(nn.Module):
    """Uses a table with the embedding's shape in the middle of the model."""

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
    """A scale for each channel and a shift for each position: their gradients are sums over all other dimensions."""

    def __init__(self, length: int = 4) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(length, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Across(nn.Module):
    """Mixes positions: transposes its input, and its output back."""

    def __init__(self, length: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(length, length)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.transpose(1, 2)).transpose(1, 2)
        return out


class Repeated(nn.Module):
    """One row expanded to all positions, without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum(1, keepdim=True).expand(x.shape)


class Sliced(nn.Module):
    """Every second column of a tensor twice as wide."""

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
    """Takes one of two branches, depending on the data. Only one of them transposes its input, or draws random
    numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.along = nn.Linear(4, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if float(x.detach()[0, 0, 0]) > 0:
            return self.across(x.transpose(1, 2)).transpose(1, 2) * hidden_rng.random_factor()  # type: ignore[no-any-return]
        out: Tensor = self.along(x)
        return out


class Shifted(nn.Module):
    """One number for all elements: its gradient is a sum over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.shift)


class Filtered(nn.Module):
    """A convolution over positions, of which there may be any number."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.filter(x.transpose(1, 2)).transpose(1, 2)
        return out


class EachPosition(nn.Module):
    """Classes come second, as cross entropy wants them."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x).transpose(1, 2)
        return out
