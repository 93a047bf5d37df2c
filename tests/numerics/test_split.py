"""Two halves of a backward are one: I gives the gradients of the inputs, W those of the weights, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from culm.errors import LayerFailed
from culm.runtime import split
from culm.runtime.call import Manner
from culm.runtime.keys import seed_layer
from culm.runtime.segment import Segment
from culm.runtime.split import input_half, weight_half
from culm.runtime.state import State
from culm.testing import reference

from .jobs import ZOO, around, but, plain, tiny_gpt
from .layers import Dense, Rectified

Graph: TypeAlias = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]
"""(inputs, weights) -> outputs; inputs are 5 x 4, weights 4 x 4."""


def chain(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    return [torch.tanh(x[0] @ w[0]) @ w[1]]


def thrice(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    """One weight at three nodes, another with it at two of them, and a third between."""
    y = functional.linear(x[0], w[0], w[1][0])
    y = functional.layer_norm(y, [4], w[2][0], w[2][1])
    return [functional.linear(functional.linear(y, w[0], w[1][1]), w[0]) + x[0]]


def chunked(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    """Nodes with several outputs."""
    a, b = (x[0] @ w[0]).chunk(2, -1)
    c, *_ = torch.unbind(torch.stack([b * 2, a, w[1][:1, :2].expand(5, 2)]))
    return [torch.cat([a + c, b], -1) @ w[2]]


def strays(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    """Outputs without an input below them, one built on another, and one that an input reaches built on both."""
    alone = torch.tanh(w[0])
    further = alone @ w[1]
    return [alone, x[0] @ further + (x[1] @ alone), further]


def only_strays(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    return [torch.tanh(w[0]) @ w[1], w[2]]


def ends(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    """An input, a weight and one tensor twice."""
    y = x[0] @ w[0]
    return [x[1], w[1], y, y]


def in_two_ways(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    """A weight that is cast once and used twice, as under autocast."""
    cast = (w[0] * w[1]).double()
    return [((x[0].double() @ cast).relu() @ cast).float() * w[1][0], x[1] + w[2].sum()]


def skipping(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    """One output without any gradient wanted, and an input that nothing needs."""
    y = x[0] @ w[0]
    return [y.detach(), (y @ w[1]).sum(0), functional.dropout(y, 0.0)]


def untrained(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    return [torch.tanh(x[0] * x[1])]


class Both(torch.autograd.Function):
    """One node with a weight and two outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w, (x * 2) @ w

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        sum_ = first + 2 * second
        return sum_ @ w.T, x.T @ sum_


def two_ports(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    first, second = Both.apply(x[0], w[0])  # type: ignore[no-untyped-call]
    return [first.tanh() @ w[1], second.sigmoid() @ w[2]]


GRAPHS: list[Graph] = [chain, thrice, chunked, strays, only_strays, ends, in_two_ways, skipping, untrained, two_ports]


def leaves() -> tuple[list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(1)
    inputs = [torch.randn(5, 4, generator=draw).requires_grad_() for _ in range(2)]
    weights = [torch.randn(4, 4, generator=draw).requires_grad_() for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn(4, 4, generator=draw)  # of the micro-batches before
    return inputs, weights


def fused(graph: Graph) -> tuple[list[Any], list[Any]]:
    inputs, weights = leaves()
    outputs = [o for o in graph(inputs, weights) if o.requires_grad]
    torch.autograd.backward(outputs, [o.detach().cos() for o in outputs])
    return [x.grad for x in inputs], [w.grad for w in weights]


@pytest.mark.parametrize("graph", GRAPHS)
def test_two_halves_are_one_backward_bit_for_bit(graph: Graph) -> None:
    inputs, weights = leaves()
    before = [w.grad.clone() for w in weights if w.grad is not None]
    outputs = [o for o in graph(inputs, weights) if o.requires_grad]
    found, bunches = input_half(outputs, [o.detach().cos() for o in outputs], inputs)
    dinputs, dweights = fused(graph)
    for mine, theirs in zip(found, dinputs, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)  # type: ignore[arg-type]
    for weight, old in zip(weights, before, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, old), "I has nothing to do with weights"
    weight_half(bunches)
    for weight, theirs in zip(weights, dweights, strict=True):
        assert torch.equal(weight.grad, theirs)  # type: ignore[arg-type]


def test_the_second_halves_of_several_graphs_may_run_at_once() -> None:
    pieces, found = [], []
    for graph in GRAPHS:
        inputs, weights = leaves()
        outputs = [o for o in graph(inputs, weights) if o.requires_grad]
        pieces.append(input_half(outputs, [o.detach().cos() for o in outputs], inputs)[1])
        found.append(weights)
    weight_half(*pieces)
    for graph, weights in zip(GRAPHS, found, strict=True):
        for weight, theirs in zip(weights, fused(graph)[1], strict=True):
            assert torch.equal(weight.grad, theirs), graph  # type: ignore[arg-type]


@pytest.mark.parametrize("index", range(len(ZOO)))
def test_two_halves_of_any_layer_are_one_backward(index: int) -> None:
    torch.manual_seed(index)
    first, second = nn.Linear(6, 6), ZOO[index]()
    x, gradients = torch.randn(3, 4, 6, requires_grad=True), torch.randn(3, 4, 6)
    parameters = [*first.parameters(), *second.parameters()]

    def forward() -> Tensor:
        seed_layer(index)
        for parameter in parameters:
            parameter.grad = None
        out: Tensor = second(first(x))
        return out

    wanted = [x, *parameters]
    forward().backward(gradients)
    theirs = [p.grad for p in wanted]
    (dinput,), bunches = input_half([forward()], [gradients], [x])
    weight_half(bunches)
    for mine, other in zip([dinput, *(p.grad for p in parameters)], theirs, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)  # type: ignore[arg-type]


def test_the_loss_needs_no_gradient() -> None:
    inputs, weights = leaves()
    loss = (inputs[0] @ weights[0]).sum()
    (wanted,) = torch.autograd.grad(loss, inputs[:1], retain_graph=True)
    (found, unused), _ = input_half([loss], None, inputs)
    assert unused is None
    assert found is not None
    assert torch.equal(found, wanted)


def test_the_gradient_of_an_input_lies_in_one_piece() -> None:
    inputs, _ = leaves()
    (found, _), _ = input_half([inputs[0].sum()], None, inputs)
    assert found is not None
    assert found.is_contiguous()


class Kept:
    """A tensor that a graph saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("graph", [chain, thrice, chunked, strays])
def test_nothing_of_the_graph_outlives_the_second_half(graph: Graph) -> None:
    """Without the help of the garbage collector, which may come long after memory has run out."""
    watched: list[weakref.ref[Kept]] = []

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor.detach())
        watched.append(weakref.ref(kept))
        return kept

    gc.disable()
    try:
        inputs, weights = leaves()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
            outputs = list(graph(inputs, weights))
        found, bunches = input_half(outputs, [o.detach().cos() for o in outputs], inputs)
        assert any(kept() is not None for kept in watched)
        weight_half(bunches)
        del outputs, found, bunches
        assert all(kept() is None for kept in watched)
    finally:
        gc.enable()


def segment(layers: Sequence[int] = (1, 2), **changes: Any) -> Segment:
    job = but(tiny_gpt, **changes)
    return Segment(job, State(job, layers), layers)


def test_a_segment_whose_backward_is_halved_learns_the_same() -> None:
    x, gradient = torch.randn(2, 5, 8).requires_grad_(), torch.randn(2, 5, 8)
    whole, halved = segment(), segment()
    (out,), _ = whole.forward(0, 0, (x,))
    (same,), _ = halved.forward(0, 0, (x,), halves=True)
    assert torch.equal(out, same)
    (theirs,) = whole.backward(0, 0, (gradient,))
    (mine,) = halved.backward_input(0, 0, (gradient,))
    halved.backward_weight(0, 0)
    assert mine is not None
    assert theirs is not None
    assert torch.equal(mine, theirs)
    for one, other in zip(whole.layers, halved.layers, strict=True):
        assert torch.equal(one.accumulator.total, other.accumulator.total)


@pytest.mark.parametrize("halves", [False, True])
def test_a_segment_makes_short_pieces_for_a_backward_in_halves_and_either_may_come(halves: bool) -> None:
    part, x = segment(), torch.randn(2, 5, 8).requires_grad_()
    for micro in range(2):
        (out,), _ = part.forward(0, micro, (x,), halves=halves)
        assert [len(piece.layers) for piece in part.tapes[0, micro].pieces] == ([1, 1] if halves else [2])
        if micro == 0:
            part.backward_input(0, micro, (torch.ones_like(out),))
            part.backward_weight(0, micro)
        else:
            part.backward(0, micro, (torch.ones_like(out),))
    assert not part.tapes


def test_the_engine_runs_no_oftener_for_many_layers_than_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In W: it costs as much to start as a small layer, and looks at all that lies below each weight."""
    engine = Mock(wraps=split._engine)
    monkeypatch.setattr(split, "_engine", engine)
    counts = []
    for layers in ([1], [1, 2]):
        part = segment(layers)
        (out,), _ = part.forward(0, 0, (torch.randn(2, 5, 8).requires_grad_(),), halves=True)
        part.backward_input(0, 0, (torch.ones_like(out),))
        engine.reset_mock()
        part.backward_weight(0, 0)
        counts.append(engine.call_count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("recompute", [False, True])
def test_a_segment_keeps_nothing_of_a_micro_batch_that_is_done(recompute: bool) -> None:
    part = segment(recompute=recompute)
    x = torch.randn(2, 5, 8).requires_grad_()
    (out,), _ = part.forward(0, 0, (x,))
    assert len(part.tapes) == 1
    part.backward_input(0, 0, (torch.ones_like(out),))
    part.backward_weight(0, 0)
    assert not part.tapes


def test_code_that_does_not_write_gets_its_input_without_a_copy_from_the_second_time_on() -> None:
    manner, x = Manner(), torch.randn(3, requires_grad=True)
    for time in range(3):
        (lent,) = manner.lend((x,))
        assert (lent.data_ptr() == x.data_ptr()) == (time > 0)
        manner.learn((lent,), (x,))


def test_an_exact_run_learns_nothing_that_other_data_could_prove_wrong() -> None:
    manner, x = Manner(exact=True), torch.randn(3, requires_grad=True)
    for _ in range(3):
        manner.seed(0)
        (lent,) = manner.lend((x,))
        assert lent is not x
        lent.sum().backward()
        manner.learn((lent,), (x,))
    assert manner.draws


def test_code_that_writes_gets_a_copy_every_time() -> None:
    manner, x = Manner(), torch.ones(3, requires_grad=True)
    for _ in range(3):
        (lent,) = manner.lend((x,))
        lent.mul_(2.0)
        manner.learn((lent,), (x,))
        assert x.tolist() == [1.0, 1.0, 1.0]


def test_what_is_lent_lies_in_one_piece_and_so_does_its_gradient() -> None:
    manner = Manner()
    manner.writes = False
    x = torch.randn(4, 3, requires_grad=True)
    middle = x * 2
    seen: list[Tensor] = []
    middle.register_hook(seen.append)
    (lent,) = manner.lend((middle,))
    lent.t().sum(0, keepdim=True).expand(3, 4).sum().backward()
    assert seen[0].is_contiguous()
    assert manner.lend((x.t(),))[0].is_contiguous()


class Now(Dense):
    """Writes into its input in some micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        if int(x.detach()[0, 0] * 1000) % 2:
            x.mul_(2.0)
        return super().forward(x)


def test_writing_into_the_data_at_times_is_refused_where_the_layer_is_run_again() -> None:
    job = but(plain, layers=[Now, *plain.layers[1:]], recompute=True)
    part = Segment(job, State(job, [0, 1]), [0, 1])
    part.forward(0, 0, (torch.full((2, 6), 0.002),))
    with pytest.raises(LayerFailed, match=r"layer 0 \(Now\) writes into its input at times"):
        part.forward(0, 1, (torch.full((2, 6), 0.003),))


def test_writing_into_the_input_changes_neither_the_data_nor_what_is_learned() -> None:
    copying = around(Rectified, Rectified)
    assert (
        reference(copying).state_sha256
        == reference(but(copying, layers=list(map(Spared, copying.layers)))).state_sha256
    )


class Spared(nn.Module):
    """A layer that gets a copy from the user himself."""

    def __new__(cls, made: Callable[[], nn.Module]) -> Any:
        return partial(_spared, made)


def _spared(made: Callable[[], nn.Module]) -> nn.Module:
    layer = made()
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
    return layer
