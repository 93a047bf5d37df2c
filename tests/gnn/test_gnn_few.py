"""Features that are mostly zeros: less work, and the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from culm.gnn.compute import Kernel, Outcome
from culm.gnn.dropout import drop
from culm.gnn.few import Few, few
from culm.gnn.graph import TRAIN
from culm.gnn.model import initial_weights, model_of
from culm.gnn.passes import Pass
from culm.gnn.program import Step, first_gather

ROWS, WIDTH = 30, 90
NUMBERS = torch.arange(ROWS) * 7919
NOW = Pass(3, 3, True)


def words() -> Tensor:
    """One number in thirty; one row and one column without any."""
    torch.manual_seed(0)
    rows = torch.rand(ROWS, WIDTH) * (torch.rand(ROWS, WIDTH) < 1 / 30)
    rows[4], rows[:, 5] = 0, 0
    return rows


def found(rows: Tensor) -> Few:
    made = few(rows)
    assert made is not None
    return made


def test_what_is_dropped_of_a_few_is_what_is_dropped_of_all_bit_for_bit() -> None:
    thinned, all_of_them = found(words()).dropped(0.3, 1, 2, 0, NUMBERS), drop(words(), 0.3, 1, 2, 0, NUMBERS)
    again = torch.zeros(ROWS, WIDTH)
    again[thinned.rows.long(), thinned.columns.long()] = thinned.values
    assert torch.equal(again, all_of_them)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_tasks_come_to_the_same_with_a_few_as_with_all(kind: str, layers: int) -> None:
    model = model_of(kind, width=WIDTH, classes=3, layers=layers, hidden=8, heads=1, dropout=0.4, input_dropout=None)
    kernel, weights, first = Kernel(model, 1, ROWS), initial_weights(model, 0, None), first_gather(model)
    labels, roles = torch.arange(ROWS) % 3, torch.full((ROWS,), TRAIN, dtype=torch.uint8)
    last = [labels, roles] if first == layers else []

    def forward(features: Few | None) -> Outcome:
        step = Step("AV", first, False, "worker")
        return kernel.run(step, NOW, [NUMBERS, words(), *last], weights, features=features)

    def backward(*inputs: Tensor, **given: Any) -> Outcome:
        return kernel.run(Step("AV", first, True, "worker"), NOW, [NUMBERS, *inputs], weights, **given)

    dense, sparse = forward(None), forward(found(words()))
    same(dense, sparse)
    if first < layers:
        assert dense.rows is not None
        above = torch.randn(dense.rows.shape)
        same(backward(above, keep=dense.kept), backward(above, keep=sparse.kept))
        remade = backward(above, words(), features=found(words()))
        same(remade, backward(above, keep=sparse.kept), exactly=True)


def same(one: Outcome, other: Outcome, *, exactly: bool = False) -> None:
    within = 0.0 if exactly else 1e-5
    if one.rows is not None and other.rows is not None:
        torch.testing.assert_close(one.rows, other.rows, rtol=0, atol=within)
    assert one.loss == pytest.approx(other.loss)
    for layer, own in one.gradients.items():
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, other.gradients[layer][name], rtol=0, atol=within)


def test_rows_without_anything_are_few_and_full_ones_are_not() -> None:
    nothing = found(torch.zeros(4, 40))
    assert torch.equal(nothing.multiplied(torch.ones(3, 40)), torch.zeros(4, 3))
    assert torch.equal(nothing.gradient(torch.ones(4, 3)), torch.zeros(3, 40))
    assert few(torch.ones(4, 40)) is None
