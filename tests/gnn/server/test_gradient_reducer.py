"""Gradient sums: independent of the order of arrival, every contribution once."""

from __future__ import annotations

import pytest
import torch

from culm.gnn.model.gnn_model import (
    resolve_model,
)
from culm.gnn.model.pass_steps import layers_with_gradients, steps_of_pass
from culm.gnn.server.gradient_reducer import GradientReducer
from culm.gnn.server.graph_server import make_gradient_reducers


def test_a_sum_has_the_same_bits_in_any_order_of_arrival() -> None:
    values = {i: {"w": torch.tensor([10.0**i, -(3.0**i)])} for i in range(6)}
    sums = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        reducer: GradientReducer[int] = GradientReducer(range(6))
        results = [reducer.add("k", i, values[i]) for i in order]
        assert results[:-1] == [None] * 5
        assert results[-1] is not None
        sums.append(results[-1]["w"])
    assert torch.equal(*sums)


@pytest.mark.parametrize("kind", ["gcn", "gat"])
def test_a_deep_model_reduces_every_gradient_once(kind: str) -> None:
    model = resolve_model(kind, width=4, classes=2, layers=400, hidden=4, heads=1, dropout=0.0, input_dropout=None)
    reducer = make_gradient_reducers(model, 3)
    sums: dict[int, int] = {}
    for step in steps_of_pass(model, train=True):
        for layer in layers_with_gradients(model, step):
            for interval in range(3):
                total = reducer[layer].add(0, (interval, str(step)), {"bias": torch.ones(1)})
                sums[layer] = sums.get(layer, 0) + (total is not None)
    assert sums == dict.fromkeys(range(400), 1)
