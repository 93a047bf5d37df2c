"""The ledger counts what was really added to the gradient sums, and which samples: injected faults are reported."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_jobs import job, linear
from torch import Tensor, nn

from culm.runtime.compute import batch_loading, grad_accumulator, rng, split_backward
from culm.runtime.compute.grad_accumulator import GradientAccumulator
from culm.runtime.compute.segment import Segment
from culm.runtime.microbatch_stats import compare_samples
from culm.testing import simulate

FUSED: dict[str, Any] = {"pipelines": 1, "stages": 2, "schedule": "1f1b", "strategy": "none"}
SPLIT: dict[str, Any] = {"pipelines": 2, "stages": 2, "schedule": "zb", "strategy": "reroute"}
EACH_SHAPE = pytest.mark.parametrize("shape", [FUSED, SPLIT], ids=["fused", "split"])
EACH_MODE = pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
SAMPLES_PER_STEP = 8


def counted(shape: dict[str, Any], **fields: Any) -> tuple[int, int, int]:
    """(samples, samples lost, samples duplicated) of a run of two steps."""
    layers = fields.pop("layers", [linear] * 4)
    described = job(layers=layers, steps=2, global_batch=SAMPLES_PER_STEP, micro_batch=2, **fields)
    summary = simulate(described, **shape).summary
    return summary["samples"], summary["samples_lost"], summary["samples_duplicated"]


@EACH_SHAPE
@EACH_MODE
def test_without_a_fault_every_sample_is_counted_once(shape: dict[str, Any], exact: bool) -> None:
    assert counted(shape, exact=exact) == (16, 0, 0)


@EACH_MODE
def test_a_gradient_that_autograd_adds_twice_is_reported(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = torch.autograd.backward

    def twice(outputs: Any, gradients: Any) -> None:
        backward(outputs, gradients, retain_graph=True)
        backward(outputs, gradients)

    monkeypatch.setattr(torch.autograd, "backward", twice)
    assert counted(FUSED, exact=exact) == (16, 0, 16)


def test_a_gradient_that_a_split_backward_adds_twice_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    run = split_backward._run_autograd

    def twice(*given: Any, keep_graph: bool, accumulate_grad: bool) -> Any:
        if accumulate_grad:
            run(*given, keep_graph=True, accumulate_grad=True)
        return run(*given, keep_graph=keep_graph, accumulate_grad=accumulate_grad)

    monkeypatch.setattr(split_backward, "_run_autograd", twice)
    assert counted(SPLIT)[2] == 16


def test_a_gradient_that_is_added_twice_to_the_integer_sum_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    add = GradientAccumulator._add_exact

    def twice(self: GradientAccumulator, pieces: Any, max_abs: float) -> None:
        add(self, pieces, max_abs)
        add(self, pieces, max_abs)

    monkeypatch.setattr(GradientAccumulator, "_add_exact", twice)
    assert counted(FUSED, exact=True) == (16, 0, 16)


def is_bias(leaf: Tensor) -> bool:
    return leaf.dim() == 1


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves of an autograd graph."""
    todo, leaves = [output.grad_fn for output in outputs], {}
    while todo:
        node = todo.pop()
        if node is not None:
            leaves[node] = getattr(node, "variable", None)
            todo += [child for child, _ in node.next_functions]
    return [leaf for leaf in leaves.values() if leaf is not None]


@EACH_MODE
@pytest.mark.parametrize(("fault", "expected"), [("omitted", (0, 16, 0)), ("twice", (16, 0, 16))])
def test_a_fault_of_the_biases_alone_is_reported(
    fault: str, expected: tuple[int, int, int], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = torch.autograd.backward

    def faulty(outputs: Any, gradients: Any) -> None:
        leaves = leaves_of(outputs)
        if fault == "twice":
            backward(outputs, gradients, retain_graph=True, inputs=[leaf for leaf in leaves if is_bias(leaf)])
            backward(outputs, gradients)
        else:
            backward(outputs, gradients, inputs=[leaf for leaf in leaves if not is_bias(leaf)])

    monkeypatch.setattr(torch.autograd, "backward", faulty)
    assert counted(FUSED, exact=exact) == expected


@EACH_MODE
@pytest.mark.parametrize(("fault", "expected"), [("omitted", (0, 16, 0)), ("twice", (16, 0, 16))])
def test_a_fault_of_the_biases_alone_in_a_split_backward_is_reported(
    fault: str, expected: tuple[int, int, int], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = split_backward._run_autograd

    def faulty(outputs: Any, gradients: Any, inputs: Any, *, keep_graph: bool, accumulate_grad: bool) -> Any:
        if accumulate_grad and fault == "twice":
            biases = [leaf for leaf in inputs if is_bias(leaf)]
            run(outputs, gradients, biases, keep_graph=True, accumulate_grad=True)
        elif accumulate_grad:
            inputs = [leaf for leaf in inputs if not is_bias(leaf)]
        return run(outputs, gradients, inputs, keep_graph=keep_graph, accumulate_grad=accumulate_grad)

    monkeypatch.setattr(split_backward, "_run_autograd", faulty)
    assert counted(SPLIT, exact=exact) == expected


def test_a_bias_that_never_reaches_the_integer_sum_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = GradientAccumulator._grad_pieces
    monkeypatch.setattr(grad_accumulator, "_BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(GradientAccumulator, "_grad_pieces", lambda self: pieces(self)[:1])
    assert counted(SPLIT, exact=True) == (0, 16, 0)


@EACH_MODE
def test_a_backward_that_adds_nothing_is_reported(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Segment.backward

    def computes_inputs_only(self: Segment, step: int, micro: int, gradients: Any) -> Any:
        if micro != 1:
            return backward(self, step, micro, gradients)
        tape = self.tapes.pop((step, micro))
        return tuple(torch.zeros_like(x) if x.requires_grad else None for x in tape.inputs)

    monkeypatch.setattr(Segment, "backward", computes_inputs_only)
    assert counted(FUSED, exact=exact) == (12, 4, 0)


def test_a_gradient_that_never_reaches_the_integer_sum_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientAccumulator, "add_micro_batch", GradientAccumulator.detach_grads)
    assert counted(SPLIT, exact=True) == (0, 16, 0)


@EACH_SHAPE
def test_micro_batches_that_are_replaced_by_the_first_are_reported(
    shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = batch_loading.load_micro_batch
    monkeypatch.setattr(batch_loading, "load_micro_batch", lambda of, step, micro, device: load(of, step, 0, device))
    assert counted(shape) == (4, 12, 12)


def test_an_order_of_samples_that_repeats_the_first_micro_batch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    indices = rng.sample_indices
    monkeypatch.setattr(batch_loading, "sample_indices", lambda of, step, micro: indices(of, step, 0))
    assert counted(FUSED) == (4, 12, 12)


def test_the_event_names_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(GradientAccumulator, "add_micro_batch", GradientAccumulator.detach_grads)
    ran = simulate(job(layers=[linear] * 2, steps=1, exact=True), out=str(tmp_path), **FUSED)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (event,) = [event for event in map(json.loads, lines) if event["kind"] == "samples_wrong"]
    assert (event["step"], event["lost"], event["duplicated"]) == (0, ran.summary["samples_lost"], 0)


class SkippedAtRandom(nn.Module):
    """A layer that some micro-batches do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x) if random.random() < 0.5 else x
        return output


@EACH_SHAPE
@EACH_MODE
def test_a_layer_that_a_micro_batch_does_not_use_is_not_lost(shape: dict[str, Any], exact: bool) -> None:
    assert counted(shape, layers=[linear, SkippedAtRandom, linear, SkippedAtRandom], exact=exact) == (16, 0, 0)


class Scaled(torch.autograd.Function):
    """x times a scale, with a gradient for x only."""

    @staticmethod
    def forward(context: Any, scale: Tensor, x: Tensor) -> Tensor:
        context.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (scale,) = context.saved_tensors
        return None, gradient * scale


class WithoutGradient(nn.Module):
    """A layer whose first parameter, and the parameters of another layer in it, never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.gate, self.inner = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        scaled: Any = Scaled.apply
        output: Tensor = self.inner(scaled(self.scale, scaled(self.gate(x), x)))
        return output


@EACH_SHAPE
@EACH_MODE
def test_a_parameter_for_which_a_custom_function_returns_none_is_not_lost(shape: dict[str, Any], exact: bool) -> None:
    assert counted(shape, layers=[linear, WithoutGradient, linear, WithoutGradient], exact=exact) == (16, 0, 0)


def test_samples_are_compared_as_a_multiset() -> None:
    assert compare_samples([1, 2, 3], [1, 2, 3], once=True) == ([], {})
    assert compare_samples([2, 1], [1, 2], once=True) == ([], {})
    assert compare_samples([1, 1, 1], [1, 2, 3], once=True) == ([1, 2], {0: 2})
    assert compare_samples([1, 9], [1, 2], once=True) == ([1], {1: 1})
    assert compare_samples([5, 5], [5, 5], once=False) == ([], {})
    assert compare_samples([5, 5], [5, 5], once=True) == ([1], {0: 1})
