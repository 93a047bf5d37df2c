"""An interrupted W: a sum contains a micro-batch in all layers of the segment or in none, and its count says which.

W adds layer by layer and then counts, without a wait between: a halt can only happen at the waits around it. Where an
addition fails, the micro-batch is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch
from tests.tiny_jobs import job, linear

from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.errors import LayerFailed
from culm.plan.recover.lineage import WorkerInventory
from culm.runtime.compute.addition_count import Additions
from culm.runtime.compute.grad_accumulator import GradientAccumulator
from culm.runtime.compute.segment import Segment
from culm.runtime.microbatch_stats import MicroBatchStats
from culm.runtime.worker_state import WorkerState
from culm.testing import Faults, reference, simulate
from culm.testing.survival_check import run_and_compare

STEP = 1
Shares: TypeAlias = dict[tuple[int, int, int], torch.Tensor]
"""By step, layer and micro-batch: what was added to the sum of the layer."""
described = job(layers=[linear] * 6, steps=STEP + 3, exact=True)
"""Two layers per segment, so that an addition could be interrupted between them. Exact: integer sums can be
compared."""


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> Shares:
    """What each backward added, on whichever worker it ran."""
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


def compared(state: WorkerState, shares: Shares) -> int:
    """The number of micro-batches in the sums of a worker. Asserts that each sum is that of the counted micro-batches,
    in every layer."""
    seen = 0
    for replica in state.replicas.values():
        open_step = state.open_steps.get(replica.version)
        for g, stats in open_step.stats.items() if open_step is not None else ():
            if g not in replica.segments or open_step is None or g in open_step.loaded_segments:
                continue
            marked = [micro for micro, count in enumerate(stats.counts) if count]
            for layer in replica.segments[g].layers:
                _check(layer.accumulator, [shares[replica.version, layer.index, micro] for micro in marked])
            seen += len(marked)
    return seen


def _check(accumulator: GradientAccumulator, parts: Sequence[torch.Tensor]) -> None:
    expected = sum(parts, start=torch.zeros_like(accumulator.total))
    assert torch.equal(accumulator.total, expected), f"the sum of {accumulator.label} is not what is marked"


def uneven(node: int, _step: int, action: str) -> float:
    """Actions take different times on different nodes, so that a halt interrupts them at different places."""
    return 0.01 + 0.003 * node if set(action) & set("FIWB") else 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_after_a_halt_a_sum_has_a_micro_batch_in_all_layers_or_in_none_as_counted(
    schedule: str, shares: Shares, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is killed at each of its actions; survivors are halted at the wait they are in."""
    found = []
    inventory = WorkerState.inventory

    def reported(state: WorkerState) -> WorkerInventory:
        found.append(compared(state, shares))
        return inventory(state)

    monkeypatch.setattr(WorkerState, "inventory", reported)
    setup = prepare_run(described, RunConfig(pipelines=2, stages=3, schedule=schedule, strategy="reroute"))
    moments = ("1F0", "1B0", "1F1", "1B1", "1R") if schedule == "1f1b" else ("1F1", "1I0", "1W0", "1I1", "1W1", "1R")
    truth = reference(described)
    for at in moments:
        faults = Faults().kill(1, at=at, step=STEP)
        assert not run_and_compare(described, setup, faults, 0, truth, cost=uneven).faults_not_reached(faults)
    assert len(set(found)) > 1, "all were halted in one place: nothing was tried"


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_an_addition_interrupted_between_two_layers_is_not_counted(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adds: list[GradientAccumulator] = []
    marked: list[GradientAccumulator] = []
    absorb, count = GradientAccumulator.add_micro_batch, MicroBatchStats.count_backward

    def cut_off(self: GradientAccumulator) -> None:
        adds.append(self)
        if len(adds) == 2:  # the second layer of the first backward
            raise RuntimeError("cut off")
        absorb(self)

    def noted(self: MicroBatchStats, micro: int, additions: Additions) -> None:
        marked.extend(layer.accumulator for layer in self.segment.layers)
        count(self, micro, additions)

    monkeypatch.setattr(GradientAccumulator, "add_micro_batch", cut_off)
    monkeypatch.setattr(MicroBatchStats, "count_backward", noted)
    with pytest.raises(LayerFailed, match="cut off"):
        simulate(described, pipelines=1, stages=3, schedule=schedule, strategy="none")
    assert len(adds) >= 2
    assert not any(one is other for one in adds[:2] for other in marked), "the backward that was cut off is marked"
