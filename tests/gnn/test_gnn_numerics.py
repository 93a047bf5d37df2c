"""Servers, intervals and modes do not change the trained model; PyG is the reference."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gnn import pyg_reference
from tests.gnn.simulated_run import SimulatedRun, small_graph, small_model
from torch import Tensor
from torch.nn import functional

from culm.gnn.graph.csr_graph import Graph
from culm.gnn.model.dropout import dropout_rows
from culm.gnn.model.gnn_model import GnnModel, initial_weights, pyg_state_dict
from culm.gnn.model.pass_steps import multiply_orders, steps_of_pass
from culm.gnn.scheduler.interval_scheduler import Mode

EPOCHS = 20


def reference(graph: Graph, model: GnnModel) -> list[float]:
    return pyg_reference.pyg_losses(graph, model, pyg_state_dict(initial_weights(model, 0, None)), EPOCHS)


@pytest.mark.parametrize(("kind", "layers"), [("gcn", 2), ("gat", 2)])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_sync_equals_pyg_for_twenty_epochs(kind: str, layers: int, servers: int) -> None:
    check_sync_equals_pyg(kind, layers, servers)


@pytest.mark.parametrize(("kind", "layers", "servers"), [("gcn", 1, 4), ("gcn", 3, 2), ("gat", 1, 2)])
def test_sync_equals_pyg_with_one_and_three_layers(kind: str, layers: int, servers: int) -> None:
    check_sync_equals_pyg(kind, layers, servers)


def check_sync_equals_pyg(kind: str, layers: int, servers: int) -> None:
    graph = small_graph()
    model = small_model(graph, kind, layers=layers)
    losses = SimulatedRun(graph, model, servers=servers, intervals=2, epochs=EPOCHS).run().losses
    assert [losses[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)


def test_a_layer_that_widens_is_gathered_first_and_still_equals_pyg() -> None:
    graph = small_graph()
    model = GnnModel(kind="gcn", widths=(graph.width, 3, 9, graph.classes), dropout=0.0, input_dropout=0.0)
    assert multiply_orders(model) == ("cached", "gather", "multiply")
    losses = SimulatedRun(graph, model, mode="pipe", epochs=EPOCHS).run().losses
    assert [losses[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)


def test_a_last_layer_that_widens_is_fused_with_its_loss_on_a_worker() -> None:
    graph = small_graph()
    model = GnnModel(kind="gcn", widths=(graph.width, 2, graph.classes), dropout=0.0, input_dropout=0.0)
    assert steps_of_pass(model, train=True)[-4].place == "worker"
    losses = SimulatedRun(graph, model, mode="pipe", epochs=EPOCHS).run().losses
    assert [losses[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)


@functools.cache
def model_with_dropout(kind: str) -> tuple[Graph, GnnModel]:
    graph = small_graph()
    return graph, small_model(graph, kind, dropout=0.3)


@functools.cache
def failure_free_weights(kind: str, intervals: int) -> dict[int, dict[str, Tensor]]:
    """The weights of a run in sync mode without repeated tasks."""
    return SimulatedRun(*model_with_dropout(kind), mode="sync", intervals=intervals, order_seed=0).run().weights


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(["sync", "pipe"]), st.integers(1, 4), st.sampled_from(["gcn", "gat"]))
def test_the_order_of_tasks_changes_no_bit(order_seed: int, mode: Mode, intervals: int, kind: str) -> None:
    graph, model = model_with_dropout(kind)
    result = SimulatedRun(graph, model, mode=mode, intervals=intervals, order_seed=order_seed, repeat_chance=0.3).run()
    for layer, weights in failure_free_weights(kind, intervals).items():
        for name, tensor in weights.items():
            assert torch.equal(tensor, result.weights[layer][name])


def test_the_place_of_apply_edge_changes_no_bit() -> None:
    graph = small_graph()
    model = small_model(graph, "gat", dropout=0.3)
    assert (
        SimulatedRun(graph, model, edge_place="server").run().losses
        == SimulatedRun(graph, model, edge_place="worker").run().losses
    )


class KeyedDropout:
    """Replaces torch.nn.functional where PyG drops attention: culm's mask with PyG's arithmetic."""

    def __init__(self, graph: Graph, model: GnnModel) -> None:
        edges = pyg_reference.edge_index(graph)
        loops = torch.arange(graph.vertices)
        self._numbers = torch.cat([edges[1] * graph.vertices + edges[0], loops * graph.vertices + loops])
        self._model, self._calls = model, 0

    def leaky_relu(self, rows: Tensor, slope: float) -> Tensor:
        return functional.leaky_relu(rows, slope)

    def dropout(self, rows: Tensor, p: float, training: bool) -> Tensor:
        epoch, layer = divmod(self._calls, self._model.layers)
        self._calls += 1
        return rows * dropout_rows(torch.ones_like(rows), p, 0, epoch, layer, self._numbers, purpose="attention")


@pytest.mark.parametrize("servers", [1, 3])
def test_attention_is_dropped_as_pyg_drops_it(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    widths = (graph.width, 6, graph.classes)
    model = GnnModel(kind="gat", widths=widths, heads=2, dropout=0.0, input_dropout=0.0, attention_dropout=0.4)
    monkeypatch.setattr(pyg_reference.import_pyg("nn.conv.gat_conv"), "F", KeyedDropout(graph, model))
    losses = SimulatedRun(graph, model, servers=servers, epochs=EPOCHS).run().losses
    assert [losses[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)
    without_dropout = SimulatedRun(graph, small_model(graph, "gat"), servers=servers, epochs=1).run().losses
    assert losses[0] != without_dropout[0]


def test_dropout_does_not_depend_on_servers_or_intervals() -> None:
    graph = small_graph()
    model = small_model(graph, dropout=0.5)
    one = SimulatedRun(graph, model, servers=1, intervals=1).run().losses
    many = SimulatedRun(graph, model, servers=3, intervals=4).run().losses
    assert many == pytest.approx(one, abs=1e-5)


def test_evaluations_change_no_bit() -> None:
    graph = small_graph()
    model = small_model(graph, dropout=0.5)
    assert SimulatedRun(graph, model, evaluate_every=2).run().losses == SimulatedRun(graph, model).run().losses


def test_async_differs_and_still_learns() -> None:
    graph = small_graph()
    model = small_model(graph)
    exact = SimulatedRun(graph, model, mode="pipe", epochs=60).run().losses
    for staleness in (0, 1):
        stale = SimulatedRun(graph, model, mode="async", staleness=staleness, epochs=60, order_seed=3).run().losses
        assert stale != exact
        assert stale[59] < (exact[0] + exact[59]) / 2
