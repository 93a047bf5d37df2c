"""Prediction of stale weights with Adam's expected updates; the true weights are kept and returned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gnn.simulated_run import SimulatedRun, small_graph, small_model

from culm.gnn.graph.graph_generators import generate_graph
from culm.gnn.model.gnn_model import GnnModel
from culm.gnn.scheduler.interval_scheduler import Mode
from culm.gnn.scheduler.passes import Pass
from culm.gnn.server.weight_prediction import StashedWeights, from_wire_tensors
from culm.gnn.server.weight_stash import Adam, WeightStash

ADAM = Adam(lr=0.02, weight_decay=1e-3)
DENSE = "gen:rmat,scale=7,degree=16,features=32,classes=8"


def gradient(epoch: int) -> dict[str, torch.Tensor]:
    return {"bias": torch.tensor([0.5, -0.1 * epoch, 2.0])}


def make_stash(epochs: int, *, lookahead: bool = True) -> WeightStash:
    stash = WeightStash([0], 1, ADAM, lookahead=lookahead)
    stash.load({"0.bias": torch.tensor([1.0, -2.0, 0.5])}, 0)
    for epoch in range(epochs):
        stash.add_gradient(epoch, 0, 0, gradient(epoch))
    return stash


def newest(stash: WeightStash) -> StashedWeights:
    stashed = stash.get_version(0, stash.newest_version(0))
    assert stashed is not None
    return stashed


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_the_expected_update_is_the_last_one_of_torch(updates: int) -> None:
    theirs = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = torch.optim.Adam([theirs], lr=ADAM.lr, weight_decay=ADAM.weight_decay)
    before = theirs.detach().clone()
    for epoch in range(updates):
        before = theirs.detach().clone()
        theirs.grad = gradient(epoch)["bias"]
        optimizer.step()
    stashed = newest(make_stash(updates))
    last_update = theirs.detach() - before
    assert torch.allclose(stashed.predict(1)["bias"], theirs.detach() + last_update, atol=1e-6)
    assert torch.allclose(stashed.predict(3)["bias"], theirs.detach() + 3 * last_update, atol=1e-6)


def test_the_expected_update_is_zero_before_the_first_one() -> None:
    assert torch.equal(newest(make_stash(0)).predict(2)["bias"], newest(make_stash(0)).weights["bias"])


def test_true_weights_do_not_depend_on_lookahead_bit_for_bit() -> None:
    predicted, plain = newest(make_stash(4)), newest(make_stash(4, lookahead=False))
    assert torch.equal(predicted.predict(0)["bias"], plain.weights["bias"])
    assert torch.equal(plain.predict(2)["bias"], plain.weights["bias"])
    assert not torch.equal(predicted.predict(1)["bias"], plain.weights["bias"])


def test_a_checkpoint_has_true_weights_and_the_same_prediction_after_loading() -> None:
    stash, reloaded = make_stash(3), make_stash(0)
    assert torch.equal(
        stash.checkpoint_tensors(0)["0.bias"], make_stash(3, lookahead=False).checkpoint_tensors(0)["0.bias"]
    )
    reloaded.load(stash.checkpoint_tensors(0), 3)
    assert torch.equal(newest(reloaded).predict(2)["bias"], newest(stash).predict(2)["bias"])


def test_a_version_is_freed_with_its_expected_update() -> None:
    stash = make_stash(3)
    stash.release_older_than(0, 0, 3)
    assert stash.stashed_versions(0) == [3]


@pytest.mark.parametrize("lookahead", [True, False])
def test_wire_tensors_round_trip(lookahead: bool) -> None:
    sent = newest(make_stash(2, lookahead=lookahead))
    stashed = from_wire_tensors(["bias"], sent.wire_tensors(["bias"]))
    assert len(sent.wire_tensors(["bias"])) == 1 + lookahead
    assert torch.equal(stashed.predict(1)["bias"], sent.predict(1)["bias"])


def test_updates_behind_is_the_staleness_of_a_pass_and_zero_for_an_evaluation() -> None:
    assert Pass(number=7, epoch=6, train=True).updates_behind(4) == 2
    assert Pass(number=7, epoch=6, train=True).updates_behind(6) == 0
    assert Pass(number=8, epoch=6, train=False).updates_behind(7) == 0


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from([("sync", 0), ("pipe", 0)]))
def test_lookahead_changes_no_bit_without_staleness(order_seed: int, mode_and_staleness: tuple[Mode, int]) -> None:
    graph = small_graph()
    runs = [
        SimulatedRun(
            graph,
            small_model(graph),
            mode=mode_and_staleness[0],
            order_seed=order_seed,
            lookahead=lookahead,
            evaluate_every=2,
        ).run()
        for lookahead in (True, False)
    ]
    assert runs[0].losses == runs[1].losses
    for layer, weights in runs[0].weights.items():
        assert all(torch.equal(weight, runs[1].weights[layer][name]) for name, weight in weights.items())


def test_lookahead_changes_no_loss_of_async_without_staleness() -> None:
    graph = small_graph()
    runs = [
        SimulatedRun(graph, small_model(graph), mode="async", lookahead=predicted).run().losses
        for predicted in (True, False)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("staleness", [1, 2])
def test_lookahead_recovers_most_of_the_cost_of_stale_weights(staleness: int) -> None:
    graph = generate_graph(DENSE)
    model = GnnModel(kind="gcn", widths=(graph.width, 32, graph.classes), dropout=0.0, input_dropout=0.0)

    def loss(mode: Mode, staleness: int = 0, *, lookahead: bool = False) -> float:
        adam = Adam(lr=0.01, weight_decay=0.0)
        run = SimulatedRun(
            graph, model, servers=1, mode=mode, staleness=staleness, lookahead=lookahead, epochs=30, adam=adam
        )
        return run.run().losses[29]

    exact, plain, predicted = loss("sync"), loss("async", staleness), loss("async", staleness, lookahead=True)
    assert plain > exact
    assert predicted - exact < 0.6 * (plain - exact), (exact, predicted, plain)
