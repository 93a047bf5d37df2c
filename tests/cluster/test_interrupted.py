"""W, interrupted: a sum holds a micro-batch in all layers of the segment, or in none, and the mark says which.

W adds layer by layer and then marks, and nothing is heard between: a halt comes in at the waits around it. Where an add
itself fails there is no mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch

from culm.cluster.prepare import Request, prepare
from culm.errors import LayerFailed
from culm.plan.lineage import Standing
from culm.runtime.accumulate import Accumulator
from culm.runtime.book import Book
from culm.runtime.desk import Desk
from culm.runtime.segment import Segment
from culm.testing import Faults, reference, simulate
from culm.testing.survive import endure

from .jobs import job, linear

STEP = 1
Shares: TypeAlias = dict[tuple[int, int, int], torch.Tensor]
"""By step, layer and micro-batch: what was added to the sum of the layer."""
described = job(layers=[linear] * 6, steps=STEP + 3, exact=True)
"""Two layers to a segment: an add could be cut off between them. Exact: sums of integers can be compared."""


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Shares:
    """Noted as backwards add them, whoever runs them."""
    found: Shares = {}

    def watched(adds: Callable[..., object]) -> Callable[..., object]:
        def noted(self: Segment, step: int, micro: int, *given: object) -> object:
            before = [layer.accumulator.total.clone() for layer in self.layers]
            made = adds(self, step, micro, *given)
            for layer, then in zip(self.layers, before, strict=True):
                found[step, layer.index, micro] = layer.accumulator.total - then
            return made

        return noted

    for name in ("backward", "backward_weight"):
        monkeypatch.setattr(Segment, name, watched(getattr(Segment, name)))
    return found


def compared(desk: Desk, shares: Shares) -> int:
    """How many micro-batches lie in sums here: each sum is that of what is marked, in every layer."""
    seen = 0
    for holding in desk.holdings.values():
        open_step = desk.steps.get(holding.version)
        for g, book in open_step.books.items() if open_step is not None else ():
            if g not in holding.segments or open_step is None or g in open_step.loaded:
                continue
            marked = [micro for micro, count in enumerate(book.counts) if count]
            for layer in holding.segments[g].layers:
                _check(layer.accumulator, [shares[holding.version, layer.index, micro] for micro in marked])
            seen += len(marked)
    return seen


def _check(accumulator: Accumulator, parts: Sequence[torch.Tensor]) -> None:
    expected = sum(parts, start=torch.zeros_like(accumulator.total))
    assert torch.equal(accumulator.total, expected), f"the sum of {accumulator.label} is not what is marked"


def uneven(node: int, _step: int, action: str) -> float:
    """Nodes differ, so that a halt finds them in different places."""
    return 0.01 + 0.003 * node if set(action) & set("FIWB") else 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_whenever_a_halt_comes_a_sum_has_a_micro_batch_in_all_layers_or_in_none_and_the_mark_agrees(
    schedule: str, shares: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is killed at each of its actions; survivors are halted at whatever wait they are in."""
    found = []
    standing = Desk.standing

    def reported(desk: Desk) -> Standing:
        found.append(compared(desk, shares))
        return standing(desk)

    monkeypatch.setattr(Desk, "standing", reported)
    setup = prepare(described, Request(pipelines=2, stages=3, schedule=schedule, strategy="reroute"))
    moments = ("1F0", "1B0", "1F1", "1B1", "1R") if schedule == "1f1b" else ("1F1", "1I0", "1W0", "1I1", "1W1", "1R")
    truth = reference(described)
    for at in moments:
        faults = Faults().kill(1, at=at, step=STEP)
        assert not endure(described, setup, faults, 0, truth, cost=uneven).missed(faults)
    assert len(set(found)) > 1, "all were halted in one place: nothing was tried"


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_an_add_that_is_cut_off_between_two_layers_leaves_no_mark(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adds: list[Accumulator] = []
    marked: list[Accumulator] = []
    absorb, count = Accumulator.absorb, Book.count

    def cut_off(self: Accumulator) -> None:
        adds.append(self)
        if len(adds) == 2:  # the second layer of the first backward
            raise RuntimeError("cut off")
        absorb(self)

    def noted(self: Book, micro: int) -> None:
        marked.extend(layer.accumulator for layer in self.segment.layers)
        count(self, micro)

    monkeypatch.setattr(Accumulator, "absorb", cut_off)
    monkeypatch.setattr(Book, "count", noted)
    with pytest.raises(LayerFailed, match="cut off"):
        simulate(described, pipelines=1, stages=3, schedule=schedule, strategy="none")
    assert len(adds) >= 2
    assert not any(one is other for one in adds[:2] for other in marked), "the backward that was cut off is marked"
