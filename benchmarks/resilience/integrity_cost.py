"""What integrity costs, as shares of a step: checksums of frames, comparing holders, and the ledger's counts.

One worker with one stage of a GPT, real compute, in this process. Each round measures a step and each cost next to it,
so that a busy machine slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypedDict

import torch
from benchmarks.common.paired_rounds import median_interval
from benchmarks.resilience.compute_job import ComputeJob

from culm.runtime.compute.addition_count import Additions, count_additions, unreached_by_graph
from culm.runtime.compute.model_state import ModelState
from culm.testing.reference_loop import train_step
from culm.transport.frames.frame_codec import checksum, tensor_bytes

CHECKPOINT_EVERY = 50
"""Steps between two checkpoints, over which the cost of a comparison is spread."""
MICRO_BATCHES = 4


class IntegrityShare(TypedDict):
    """A cost as a share of a step: median over the rounds, and its 95 % interval."""

    share: float
    ci: list[float]
    rounds: int


def measure_integrity(rounds: int) -> dict[str, IntegrityShare]:
    """By name of the cost: its share of a step."""
    torch.set_num_threads(1)
    job = ComputeJob(stages=1, micro_batches=MICRO_BATCHES, steps=rounds + 1).build_job()
    state = ModelState(job, range(len(job.layers)))
    spec = ComputeJob(stages=1, micro_batches=MICRO_BATCHES, steps=1).spec
    activation = torch.randn(spec.micro_batch, spec.tokens, spec.width)
    costs: dict[str, Callable[[], None]] = {
        "frames": lambda: _checksum_frames(activation),
        "comparison": lambda: _compare(state),
        "ledger": lambda: _count_additions(state),
    }
    shares: dict[str, list[float]] = {name: [] for name in costs}
    train_step(job, state, 0)
    for number in range(rounds):
        step_s = _seconds(lambda step=number + 1: train_step(job, state, step))  # type: ignore[misc]
        for name, cost in costs.items():
            spread = CHECKPOINT_EVERY if name == "comparison" else 1
            shares[name].append(_seconds(cost) / spread / step_s)
    return {
        name: IntegrityShare(share=median(values), ci=list(median_interval(values)), rounds=rounds)
        for name, values in shares.items()
    }


def _checksum_frames(activation: torch.Tensor) -> None:
    """What a worker in the middle of a pipeline computes in a step: for each micro-batch it sends and receives an
    activation and a gradient."""
    for _ in range(4 * MICRO_BATCHES):
        checksum([tensor_bytes(activation)])


def _compare(state: ModelState) -> None:
    for layer in state.layers:
        state.snapshot([layer]).checksum()


def _count_additions(state: ModelState) -> None:
    """What a worker does for the ledger in a step: the hook of each parameter, and the count of each micro-batch."""
    layers = list(state.layers.values())
    hooks = [
        (hook, parameter)
        for layer in layers
        for parameter in layer.trainable.values()
        for hook in (parameter._post_accumulate_grad_hooks or {}).values()
    ]
    for _ in range(MICRO_BATCHES):
        for hook, parameter in hooks:
            hook(parameter)
        counted = count_additions(layers, unreached_by_graph(layers, ()))
        assert counted == Additions(1, 1), "every parameter was added once"


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
