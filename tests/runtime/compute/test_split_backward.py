"""A split backward equals a fused one: I gives the gradients of the inputs, W those of the weights, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
import torch
from tests.runtime.sample_jobs import ZOO, job_around, job_with, plain, tiny_gpt
from tests.runtime.sample_layers import Dense, Rectified
from torch import Tensor, nn
from torch.nn import functional

from culm.errors import LayerFailed
from culm.runtime.compute import split_backward
from culm.runtime.compute.model_state import ModelState
from culm.runtime.compute.rng import seed_layer
from culm.runtime.compute.segment import Segment
from culm.runtime.compute.split_backward import input_backward, weight_backward
from culm.runtime.compute.user_code import UserCodeTraits
from culm.testing import reference

Graph: TypeAlias = Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]]
"""(inputs, weights) -> outputs; inputs are 5 x 4, weights 4 x 4."""


def chain(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    return [torch.tanh(x[0] @ w[0]) @ w[1]]


def thrice(x: list[Tensor], w: list[Tensor]) -> Sequence[Tensor]:
    """One weight at three nodes, another one at two of them, and a third one between."""
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
    """One output that needs no gradient, and an input that is not used."""
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
def test_a_split_backward_equals_a_fused_one_bit_for_bit(graph: Graph) -> None:
    inputs, weights = leaves()
    before = [w.grad.clone() for w in weights if w.grad is not None]
    outputs = [o for o in graph(inputs, weights) if o.requires_grad]
    found, bunches = input_backward(outputs, [o.detach().cos() for o in outputs], inputs)
    dinputs, dweights = fused(graph)
    for mine, theirs in zip(found, dinputs, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)  # type: ignore[arg-type]
    for weight, old in zip(weights, before, strict=True):
        assert weight.grad is not None
        assert torch.equal(weight.grad, old), "I has nothing to do with weights"
    weight_backward(bunches)
    for weight, theirs in zip(weights, dweights, strict=True):
        assert torch.equal(weight.grad, theirs)  # type: ignore[arg-type]


def test_weight_backwards_of_several_graphs_can_run_in_one_call() -> None:
    pieces, found = [], []
    for graph in GRAPHS:
        inputs, weights = leaves()
        outputs = [o for o in graph(inputs, weights) if o.requires_grad]
        pieces.append(input_backward(outputs, [o.detach().cos() for o in outputs], inputs)[1])
        found.append(weights)
    weight_backward(*pieces)
    for graph, weights in zip(GRAPHS, found, strict=True):
        for weight, theirs in zip(weights, fused(graph)[1], strict=True):
            assert torch.equal(weight.grad, theirs), graph  # type: ignore[arg-type]


@pytest.mark.parametrize("index", range(len(ZOO)))
def test_a_split_backward_of_any_layer_equals_a_fused_one(index: int) -> None:
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
    (dinput,), bunches = input_backward([forward()], [gradients], [x])
    weight_backward(bunches)
    for mine, other in zip([dinput, *(p.grad for p in parameters)], theirs, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)  # type: ignore[arg-type]


def test_the_loss_needs_no_gradient() -> None:
    inputs, weights = leaves()
    loss = (inputs[0] @ weights[0]).sum()
    (wanted,) = torch.autograd.grad(loss, inputs[:1], retain_graph=True)
    (found, unused), _ = input_backward([loss], None, inputs)
    assert unused is None
    assert found is not None
    assert torch.equal(found, wanted)


def test_the_gradient_of_an_input_is_contiguous() -> None:
    inputs, _ = leaves()
    (found, _), _ = input_backward([inputs[0].sum()], None, inputs)
    assert found is not None
    assert found.is_contiguous()


class Kept:
    """A tensor that a graph saved."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("graph", [chain, thrice, chunked, strays])
def test_the_graph_is_freed_after_the_weight_backward(graph: Graph) -> None:
    """Without the garbage collector, which may run long after memory is exhausted."""
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
        found, bunches = input_backward(outputs, [o.detach().cos() for o in outputs], inputs)
        assert any(kept() is not None for kept in watched)
        weight_backward(bunches)
        del outputs, found, bunches
        assert all(kept() is None for kept in watched)
    finally:
        gc.enable()


def segment(layers: Sequence[int] = (1, 2), **changes: Any) -> Segment:
    job = job_with(tiny_gpt, **changes)
    return Segment(job, ModelState(job, layers), layers)


def test_a_segment_with_a_split_backward_trains_the_same() -> None:
    x, gradient = torch.randn(2, 5, 8).requires_grad_(), torch.randn(2, 5, 8)
    whole, halved = segment(), segment()
    (out,), _ = whole.forward(0, 0, (x,))
    (same,), _ = halved.forward(0, 0, (x,), splits_backward=True)
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
def test_a_segment_makes_short_pieces_for_a_split_backward_and_supports_a_fused_one(halves: bool) -> None:
    part, x = segment(), torch.randn(2, 5, 8).requires_grad_()
    for micro in range(2):
        (out,), _ = part.forward(0, micro, (x,), splits_backward=halves)
        assert [len(piece.layers) for piece in part.tapes[0, micro].pieces] == ([1, 1] if halves else [2])
        if micro == 0:
            part.backward_input(0, micro, (torch.ones_like(out),))
            part.backward_weight(0, micro)
        else:
            part.backward(0, micro, (torch.ones_like(out),))
    assert not part.tapes


def test_the_engine_runs_as_often_for_many_layers_as_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In W: starting the engine costs as much as a small layer, and it visits all nodes below each weight."""
    engine = Mock(wraps=split_backward._run_autograd)
    monkeypatch.setattr(split_backward, "_run_autograd", engine)
    counts = []
    for layers in ([1], [1, 2]):
        part = segment(layers)
        (out,), _ = part.forward(0, 0, (torch.randn(2, 5, 8).requires_grad_(),), splits_backward=True)
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


def test_code_that_does_not_write_gets_no_copy_of_its_input_after_the_first_call() -> None:
    manner, x = UserCodeTraits(), torch.randn(3, requires_grad=True)
    for time in range(3):
        (lent,) = manner.prepare_inputs((x,))
        assert (lent.data_ptr() == x.data_ptr()) == (time > 0)
        manner.update_from_run((lent,), (x,))


def test_an_exact_run_assumes_nothing_that_other_data_could_disprove() -> None:
    manner, x = UserCodeTraits(exact=True), torch.randn(3, requires_grad=True)
    for _ in range(3):
        manner.seed(0)
        (lent,) = manner.prepare_inputs((x,))
        assert lent is not x
        lent.sum().backward()
        manner.update_from_run((lent,), (x,))
    assert manner.uses_python_rng


def test_code_that_writes_gets_a_copy_every_time() -> None:
    manner, x = UserCodeTraits(), torch.ones(3, requires_grad=True)
    for _ in range(3):
        (lent,) = manner.prepare_inputs((x,))
        lent.mul_(2.0)
        manner.update_from_run((lent,), (x,))
        assert x.tolist() == [1.0, 1.0, 1.0]


def test_prepared_inputs_and_their_gradients_are_contiguous() -> None:
    manner = UserCodeTraits()
    manner.writes_inputs = False
    x = torch.randn(4, 3, requires_grad=True)
    middle = x * 2
    seen: list[Tensor] = []
    middle.register_hook(seen.append)
    (lent,) = manner.prepare_inputs((middle,))
    lent.t().sum(0, keepdim=True).expand(3, 4).sum().backward()
    assert seen[0].is_contiguous()
    assert manner.prepare_inputs((x.t(),))[0].is_contiguous()


class Now(Dense):
    """Writes into its input in some micro-batches."""

    def forward(self, x: Tensor) -> Tensor:
        if int(x.detach()[0, 0] * 1000) % 2:
            x.mul_(2.0)
        return super().forward(x)


def test_writing_into_the_input_only_sometimes_is_refused_with_recompute() -> None:
    job = job_with(plain, layers=[Now, *plain.layers[1:]], recompute=True)
    part = Segment(job, ModelState(job, [0, 1]), [0, 1])
    part.forward(0, 0, (torch.full((2, 6), 0.002),))
    with pytest.raises(LayerFailed, match=r"layer 0 \(Now\) writes into its input at times"):
        part.forward(0, 1, (torch.full((2, 6), 0.003),))


def test_writing_into_the_input_changes_neither_the_data_nor_the_training() -> None:
    copying = job_around(Rectified, Rectified)
    assert (
        reference(copying).state_sha256
        == reference(job_with(copying, layers=list(map(Spared, copying.layers)))).state_sha256
    )


class Spared(nn.Module):
    """A layer that passes a copy of its input on."""

    def __new__(cls, made: Callable[[], nn.Module]) -> Any:
        return partial(_spared, made)


def _spared(made: Callable[[], nn.Module]) -> nn.Module:
    layer = made()
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(),))
    return layer
