"""Servers, intervals and modes do not change what is learned; PyG is the judge."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gnn import peer
from tests.gnn.house import House, small_graph, small_model
from torch import Tensor
from torch.nn import functional

from culm.gnn.board import Mode
from culm.gnn.dropout import drop
from culm.gnn.graph import Graph
from culm.gnn.model import Model, initial_weights, state_dict
from culm.gnn.program import orders, walk

EPOCHS = 20


def reference(graph: Graph, model: Model) -> list[float]:
    return peer.losses(graph, model, state_dict(initial_weights(model, 0, None)), EPOCHS)


@pytest.mark.parametrize(("kind", "layers"), [("gcn", 2), ("gat", 2)])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_sync_equals_pyg_for_twenty_epochs(kind: str, layers: int, servers: int) -> None:
    sync_equals_pyg(kind, layers, servers)


@pytest.mark.parametrize(("kind", "layers", "servers"), [("gcn", 1, 4), ("gcn", 3, 2), ("gat", 1, 2)])
def test_so_it_does_with_one_layer_and_with_three(kind: str, layers: int, servers: int) -> None:
    sync_equals_pyg(kind, layers, servers)


def sync_equals_pyg(kind: str, layers: int, servers: int) -> None:
    graph = small_graph()
    model = small_model(graph, kind, layers=layers)
    found = House(graph, model, servers=servers, intervals=2, epochs=EPOCHS).run().losses
    assert [found[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)


def test_a_layer_that_widens_is_gathered_first_and_still_equals_pyg() -> None:
    graph = small_graph()
    model = Model(kind="gcn", widths=(graph.width, 3, 9, graph.classes), dropout=0.0, input_dropout=0.0)
    assert orders(model) == ("cached", "gather", "multiply")
    found = House(graph, model, mode="pipe", epochs=EPOCHS).run().losses
    assert [found[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)


def test_a_last_layer_that_widens_is_fused_with_its_loss_on_a_worker() -> None:
    graph = small_graph()
    model = Model(kind="gcn", widths=(graph.width, 2, graph.classes), dropout=0.0, input_dropout=0.0)
    assert walk(model, train=True)[-4].place == "worker"
    found = House(graph, model, mode="pipe", epochs=EPOCHS).run().losses
    assert [found[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)


@functools.cache
def dropping(kind: str) -> tuple[Graph, Model]:
    graph = small_graph()
    return graph, small_model(graph, kind, dropout=0.3)


@functools.cache
def calm(kind: str, intervals: int) -> dict[int, dict[str, Tensor]]:
    """The weights that are learned if nothing is left to chance."""
    return House(*dropping(kind), mode="sync", intervals=intervals, chance=0).run().weights


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from(["sync", "pipe"]), st.integers(1, 4), st.sampled_from(["gcn", "gat"]))
def test_the_order_in_which_things_happen_changes_no_bit(chance: int, mode: Mode, intervals: int, kind: str) -> None:
    graph, model = dropping(kind)
    wild = House(graph, model, mode=mode, intervals=intervals, chance=chance, repeat=0.3).run()
    for layer, weights in calm(kind, intervals).items():
        for name, tensor in weights.items():
            assert torch.equal(tensor, wild.weights[layer][name])


def test_who_applies_the_edges_changes_no_bit() -> None:
    graph = small_graph()
    model = small_model(graph, "gat", dropout=0.3)
    assert House(graph, model, edges="server").run().losses == House(graph, model, edges="worker").run().losses


class Chance:
    """Stands in for torch.nn.functional where PyG drops attention: the mask is ours, the arithmetic is its own."""

    def __init__(self, graph: Graph, model: Model) -> None:
        edges = peer.edge_index(graph)
        loops = torch.arange(graph.vertices)
        self._numbers = torch.cat([edges[1] * graph.vertices + edges[0], loops * graph.vertices + loops])
        self._model, self._calls = model, 0

    def leaky_relu(self, rows: Tensor, slope: float) -> Tensor:
        return functional.leaky_relu(rows, slope)

    def dropout(self, rows: Tensor, p: float, training: bool) -> Tensor:
        epoch, layer = divmod(self._calls, self._model.layers)
        self._calls += 1
        return rows * drop(torch.ones_like(rows), p, 0, epoch, layer, self._numbers, what="attention")


@pytest.mark.parametrize("servers", [1, 3])
def test_attention_is_dropped_as_pyg_drops_it(servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    widths = (graph.width, 6, graph.classes)
    model = Model(kind="gat", widths=widths, heads=2, dropout=0.0, input_dropout=0.0, attention_dropout=0.4)
    monkeypatch.setattr(peer.pyg("nn.conv.gat_conv"), "F", Chance(graph, model))
    found = House(graph, model, servers=servers, epochs=EPOCHS).run().losses
    assert [found[e] for e in range(EPOCHS)] == pytest.approx(reference(graph, model), abs=1e-5)
    whole = House(graph, small_model(graph, "gat"), servers=servers, epochs=1).run().losses
    assert found[0] != whole[0]


def test_dropout_does_not_depend_on_servers_or_intervals() -> None:
    graph = small_graph()
    model = small_model(graph, dropout=0.5)
    one = House(graph, model, servers=1, intervals=1).run().losses
    many = House(graph, model, servers=3, intervals=4).run().losses
    assert many == pytest.approx(one, abs=1e-5)


def test_evaluations_in_between_change_no_bit() -> None:
    graph = small_graph()
    model = small_model(graph, dropout=0.5)
    assert House(graph, model, evaluate_every=2).run().losses == House(graph, model).run().losses


def test_asynchrony_learns_other_numbers_and_still_learns() -> None:
    graph = small_graph()
    model = small_model(graph)
    exact = House(graph, model, mode="pipe", epochs=60).run().losses
    for staleness in (0, 1):
        stale = House(graph, model, mode="async", staleness=staleness, epochs=60, chance=3).run().losses
        assert stale != exact
        assert stale[59] < (exact[0] + exact[59]) / 2
