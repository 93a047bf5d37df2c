"""Sparse features: less work, same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from culm.gnn.graph.csr_graph import TRAIN
from culm.gnn.model.dropout import dropout_rows
from culm.gnn.model.gnn_model import initial_weights, resolve_model
from culm.gnn.model.pass_steps import PassStep, first_gathered_layer
from culm.gnn.model.sparse_rows import SparseRows, to_sparse_rows
from culm.gnn.model.task_kernel import TaskKernel, TaskResult
from culm.gnn.scheduler.passes import Pass

ROWS, WIDTH = 30, 90
NUMBERS = torch.arange(ROWS) * 7919
TRAINING_PASS = Pass(3, 3, True)


def bag_of_words() -> Tensor:
    """Rows with one nonzero in thirty values; one row and one column are empty."""
    torch.manual_seed(0)
    rows = torch.rand(ROWS, WIDTH) * (torch.rand(ROWS, WIDTH) < 1 / 30)
    rows[4], rows[:, 5] = 0, 0
    return rows


def sparse_rows(rows: Tensor) -> SparseRows:
    converted = to_sparse_rows(rows)
    assert converted is not None
    return converted


def test_sparse_dropout_equals_dense_dropout_bit_for_bit() -> None:
    sparse_dropped, dense_dropped = (
        sparse_rows(bag_of_words()).dropout(0.3, 1, 2, 0, NUMBERS),
        dropout_rows(bag_of_words(), 0.3, 1, 2, 0, NUMBERS),
    )
    restored = torch.zeros(ROWS, WIDTH)
    restored[sparse_dropped.rows.long(), sparse_dropped.columns.long()] = sparse_dropped.values
    assert torch.equal(restored, dense_dropped)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_tasks_with_sparse_features_equal_those_with_dense_ones(kind: str, layers: int) -> None:
    model = resolve_model(
        kind, width=WIDTH, classes=3, layers=layers, hidden=8, heads=1, dropout=0.4, input_dropout=None
    )
    kernel, weights, first = TaskKernel(model, 1, ROWS), initial_weights(model, 0, None), first_gathered_layer(model)
    labels, roles = torch.arange(ROWS) % 3, torch.full((ROWS,), TRAIN, dtype=torch.uint8)
    last = [labels, roles] if first == layers else []

    def forward(features: SparseRows | None) -> TaskResult:
        step = PassStep("AV", first, False, "worker")
        return kernel.run_task(step, TRAINING_PASS, [NUMBERS, bag_of_words(), *last], weights, features=features)

    def backward(*inputs: Tensor, **options: Any) -> TaskResult:
        return kernel.run_task(
            PassStep("AV", first, True, "worker"), TRAINING_PASS, [NUMBERS, *inputs], weights, **options
        )

    dense, sparse = forward(None), forward(sparse_rows(bag_of_words()))
    same(dense, sparse)
    if first < layers:
        assert dense.rows is not None
        output_gradient = torch.randn(dense.rows.shape)
        same(
            backward(output_gradient, forward_cache=dense.forward_cache),
            backward(output_gradient, forward_cache=sparse.forward_cache),
        )
        recomputed = backward(output_gradient, bag_of_words(), features=sparse_rows(bag_of_words()))
        same(recomputed, backward(output_gradient, forward_cache=sparse.forward_cache), exactly=True)


def same(one: TaskResult, other: TaskResult, *, exactly: bool = False) -> None:
    within = 0.0 if exactly else 1e-5
    if one.rows is not None and other.rows is not None:
        torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=within)
    assert one.loss == pytest.approx(other.loss)
    for layer, gradients in one.gradients.items():
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, other.gradients[layer][name], rtol=0, atol=within)


def test_empty_rows_are_sparse_and_full_ones_are_not() -> None:
    empty = sparse_rows(torch.zeros(4, 40))
    assert torch.equal(empty.multiply(torch.ones(3, 40)), torch.zeros(4, 3))
    assert torch.equal(empty.weight_gradient(torch.ones(4, 3)), torch.zeros(3, 40))
    assert to_sparse_rows(torch.ones(4, 40)) is None
