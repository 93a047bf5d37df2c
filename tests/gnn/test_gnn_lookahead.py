"""Weights that are behind are moved ahead by what Adam is expected to add; the true ones are kept and returned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gnn.house import House, small_graph, small_model

from culm.gnn.board import Mode
from culm.gnn.generate import generate
from culm.gnn.lookahead import Stashed, received
from culm.gnn.model import Model
from culm.gnn.passes import Pass
from culm.gnn.shelf import Adam, Shelf

ADAM = Adam(lr=0.02, weight_decay=1e-3)
DENSE = "gen:rmat,scale=7,degree=16,features=32,classes=8"


def gradient(epoch: int) -> dict[str, torch.Tensor]:
    return {"bias": torch.tensor([0.5, -0.1 * epoch, 2.0])}


def shelf(epochs: int, *, lookahead: bool = True) -> Shelf:
    made = Shelf([0], 1, ADAM, lookahead=lookahead)
    made.fill({"0.bias": torch.tensor([1.0, -2.0, 0.5])}, 0)
    for epoch in range(epochs):
        made.add(epoch, 0, 0, gradient(epoch))
    return made


def newest(made: Shelf) -> Stashed:
    found = made.version(0, made.newest(0))
    assert found is not None
    return found


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_the_expected_step_is_the_one_that_torch_takes_with_these_moments(updates: int) -> None:
    theirs = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = torch.optim.Adam([theirs], lr=ADAM.lr, weight_decay=ADAM.weight_decay)
    before = theirs.detach().clone()
    for epoch in range(updates):
        before = theirs.detach().clone()
        theirs.grad = gradient(epoch)["bias"]
        optimizer.step()
    found = newest(shelf(updates))
    again = theirs.detach() - before
    assert torch.allclose(found.ahead(1)["bias"], theirs.detach() + again, atol=1e-6)
    assert torch.allclose(found.ahead(3)["bias"], theirs.detach() + 3 * again, atol=1e-6)


def test_before_the_first_update_nothing_is_expected() -> None:
    assert torch.equal(newest(shelf(0)).ahead(2)["bias"], newest(shelf(0)).weights["bias"])


def test_true_weights_are_those_of_a_shelf_that_does_not_look_ahead_bit_for_bit() -> None:
    ahead, plain = newest(shelf(4)), newest(shelf(4, lookahead=False))
    assert torch.equal(ahead.ahead(0)["bias"], plain.weights["bias"])
    assert torch.equal(plain.ahead(2)["bias"], plain.weights["bias"])
    assert not torch.equal(ahead.ahead(1)["bias"], plain.weights["bias"])


def test_what_is_saved_is_true_and_looks_as_far_ahead_when_it_is_loaded() -> None:
    made, again = shelf(3), shelf(0)
    assert torch.equal(made.snapshot(0)["0.bias"], shelf(3, lookahead=False).snapshot(0)["0.bias"])
    again.fill(made.snapshot(0), 3)
    assert torch.equal(newest(again).ahead(2)["bias"], newest(made).ahead(2)["bias"])


def test_a_version_is_forgotten_with_its_step() -> None:
    made = shelf(3)
    made.oldest(0, 0, 3)
    assert made.kept(0) == [3]


@pytest.mark.parametrize("lookahead", [True, False])
def test_what_is_sent_is_what_arrives(lookahead: bool) -> None:
    sent = newest(shelf(2, lookahead=lookahead))
    found = received(["bias"], sent.tensors(["bias"]))
    assert len(sent.tensors(["bias"])) == 1 + lookahead
    assert torch.equal(found.ahead(1)["bias"], sent.ahead(1)["bias"])


def test_a_pass_looks_as_far_ahead_as_its_weights_are_behind_and_an_evaluation_not_at_all() -> None:
    assert Pass(number=7, epoch=6, train=True).behind(4) == 2
    assert Pass(number=7, epoch=6, train=True).behind(6) == 0
    assert Pass(number=8, epoch=6, train=False).behind(7) == 0


@settings(max_examples=6)
@given(st.integers(0, 10**6), st.sampled_from([("sync", 0), ("pipe", 0)]))
def test_where_nothing_is_behind_looking_ahead_changes_no_bit(chance: int, how: tuple[Mode, int]) -> None:
    graph = small_graph()
    runs = [
        House(graph, small_model(graph), mode=how[0], chance=chance, lookahead=lookahead, evaluate_every=2).run()
        for lookahead in (True, False)
    ]
    assert runs[0].losses == runs[1].losses
    for layer, weights in runs[0].weights.items():
        assert all(torch.equal(own, runs[1].weights[layer][name]) for name, own in weights.items())


def test_without_staleness_an_asynchronous_pass_has_the_weights_it_updates() -> None:
    graph = small_graph()
    runs = [House(graph, small_model(graph), mode="async", lookahead=ahead).run().losses for ahead in (True, False)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("staleness", [1, 2])
def test_looking_ahead_takes_back_most_of_what_old_weights_cost(staleness: int) -> None:
    graph = generate(DENSE)
    model = Model(kind="gcn", widths=(graph.width, 32, graph.classes), dropout=0.0, input_dropout=0.0)

    def loss(mode: Mode, staleness: int = 0, *, lookahead: bool = False) -> float:
        adam = Adam(lr=0.01, weight_decay=0.0)
        house = House(
            graph, model, servers=1, mode=mode, staleness=staleness, lookahead=lookahead, epochs=30, adam=adam
        )
        return house.run().losses[29]

    exact, plain, ahead = loss("sync"), loss("async", staleness), loss("async", staleness, lookahead=True)
    assert plain > exact
    assert ahead - exact < 0.6 * (plain - exact), (exact, ahead, plain)
