"""Adam and the weight stash: update order, sums counted once, checkpoints."""

from __future__ import annotations

import torch

from culm.gnn.server.weight_stash import Adam, WeightStash


def test_adam_equals_torch() -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(5, 3), torch.nn.Parameter(torch.empty(5, 3))
    theirs.data.copy_(ours)
    mean, square = torch.zeros(5, 3), torch.zeros(5, 3)
    optimizer = torch.optim.Adam([theirs], lr=0.02, weight_decay=1e-3)
    for count in range(1, 6):
        theirs.grad = torch.randn(5, 3)
        Adam(lr=0.02, weight_decay=1e-3).step(ours, theirs.grad.clone(), mean, square, count)
        optimizer.step()
    assert torch.allclose(ours, theirs.data, atol=1e-7)


def make_stash(servers: int = 2) -> WeightStash:
    stash = WeightStash([0], servers, Adam(lr=0.1, weight_decay=0.0))
    stash.load({"0.bias": torch.zeros(2)}, 0)
    return stash


def test_an_update_waits_for_every_server_and_counts_each_once() -> None:
    stash = make_stash()
    gradient = {"bias": torch.ones(2)}
    assert stash.add_gradient(0, 0, 1, gradient) == []
    assert stash.add_gradient(0, 0, 1, gradient) == []
    assert stash.add_gradient(0, 0, 0, gradient) == [1]
    assert stash.add_gradient(0, 0, 0, gradient) == [], "an epoch that is over takes no gradient"


def test_updates_happen_in_the_order_of_epochs() -> None:
    stash = make_stash()
    gradient = {"bias": torch.ones(2)}
    for server in (0, 1):
        assert stash.add_gradient(1, 0, server, gradient) == []
    assert stash.add_gradient(0, 0, 0, gradient) == []
    assert stash.add_gradient(0, 0, 1, gradient) == [1, 2]


def test_a_stash_continues_from_its_checkpoint_bit_for_bit() -> None:
    stash, reloaded = make_stash(1), make_stash(1)
    for epoch in range(3):
        stash.add_gradient(epoch, 0, 0, {"bias": torch.tensor([0.5, -0.1 * epoch])})
    reloaded.load(stash.checkpoint_tensors(0), 3)
    for continued in (stash, reloaded):
        continued.add_gradient(3, 0, 0, {"bias": torch.tensor([0.3, 0.7])})
    assert torch.equal(stash.checkpoint_tensors(0)["0.bias"], reloaded.checkpoint_tensors(0)["0.bias"])
