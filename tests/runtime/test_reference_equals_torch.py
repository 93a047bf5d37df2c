"""The reference equals a plain torch loop: bit for bit where the arithmetic is the same, otherwise up to rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.runtime.sample_data import WIDTH, adamw, sgd, warm
from tests.runtime.sample_jobs import JOBS, dense, job_around, job_with, plain, tiny_gpt
from tests.runtime.sample_layers import Dense, Frozen, HalfFrozen
from torch import Tensor, nn

from culm.job import Job
from culm.runtime.compute import buffer_statistics
from culm.runtime.compute.batch_loading import load_micro_batch
from culm.runtime.compute.model_state import build_layer
from culm.runtime.compute.rng import derive_seed, seed_layer
from culm.runtime.compute.weight_update import sequential_sum
from culm.testing import ReferenceResult, reference

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Looped:
    """The result of the plain loop."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers, as in a state_dict."""
    moments: dict[str, Tensor] = field(default_factory=dict)


class Plain:
    """nn.Sequential, one optimizer, LambdaLR: no stage, no plan, nothing of culm except its seeds for samples and
    draws."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = nn.Sequential(*(build_layer(job, index) for index in range(len(job.layers)))).train()
        for first, *others in job.tied:
            for name in others:
                owner, _, own = name.rpartition(".")
                setattr(self.model.get_submodule(owner), own, self.model.get_parameter(first))
        self.step = self.micro = 0
        for index, layer in enumerate(self.model):
            layer.register_forward_pre_hook(self._seed(index))
        self.trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = job.optimizer(list(self.trained.values()))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, job.lr_schedule or (lambda _: 1.0))

    def _seed(self, index: int) -> Callable[..., None]:
        return lambda *_: seed_layer(derive_seed(self.job.seed, self.step, self.micro, index))

    def run(self) -> Looped:
        losses = [self._step(step) for step in range(self.job.steps)]
        moments = {
            f"optimizer.{name}.{part}": value
            for name, parameter in self.trained.items()
            for part, value in self.optimizer.state[parameter].items()
        }
        return Looped(losses, self.model.state_dict(), moments)

    def _step(self, step: int) -> float:
        self.step, count = step, self.job.micro_batches
        self.optimizer.zero_grad()
        total, weights = 0.0, 0.0
        for self.micro in range(count):
            loss, weight = self._loss()
            (loss / count if weight is None else loss).backward()
            total += loss.item()
            weights += 1.0 if weight is None else float(weight)
        for parameter in self.trained.values():
            if weight is not None and parameter.grad is not None:
                parameter.grad /= weights
        if self.job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.trained.values(), self.job.clip_norm)
        self.optimizer.step()
        self.schedule.step()
        return total / weights

    def _loss(self) -> tuple[Tensor, Any]:
        inputs, target, _ = load_micro_batch(self.job, self.step, self.micro, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.job.precision == "bf16"):
            made = self.job.loss(self.model(inputs[0]), target)
        return made if isinstance(made, tuple) else (made, None)


def both(job: Job) -> tuple[ReferenceResult, Looped]:
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        return reference(job), Plain(job).run()
    finally:
        torch.set_num_threads(before)


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


EVEN: dict[str, Any] = {"global_batch": 8, "micro_batch": 2}
"""M = 4, a power of two: dividing before the sum equals dividing after it."""
Linear = partial(nn.Linear, WIDTH, WIDTH)
FROZEN = [Frozen, Dense, HalfFrozen, Frozen, Dense]
SAME = {
    "AdamW": plain,
    "SGD with momentum": job_with(optimizer=sgd),
    "clipping": job_with(optimizer=sgd, clip_norm=0.05),
    "clipping with AdamW": job_with(optimizer=adamw, clip_norm=0.05),
    "a schedule": job_with(optimizer=sgd, lr_schedule=warm),
    "dropout": job_with(layers=dense(dropout=0.4)),
    "bf16": job_with(layers=dense(dropout=0.4), precision="bf16"),
    "frozen": job_with(layers=FROZEN, data=plain.data, clip_norm=0.05),
    "GPT": tiny_gpt,
    "GPT in bf16": job_with(tiny_gpt, precision="bf16", optimizer=sgd),
    "one weight twice": JOBS["one weight twice"],
    "attention": JOBS["attention"],
    "gradients taken away": JOBS["gradients taken away"],
    "gradients replaced": JOBS["gradients replaced"],
    "gradients in forward": JOBS["gradients in forward"],
    "turned weight, fused": JOBS["turned weight, fused"],
    "float64, clipped": job_with(
        layers=[Wide, *[partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)] * 2], clip_norm=0.05
    ),
    "in place": job_with(
        layers=[Linear, partial(nn.ReLU, inplace=True), Linear, partial(nn.Dropout, 0.2, inplace=True), Dense]
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_reference_is_the_plain_loop_bit_for_bit(name: str) -> None:
    job = job_with(SAME[name], **EVEN)
    ours, theirs = both(job)
    assert ours.losses == theirs.losses
    assert set(ours.snapshot.parameters) | set(ours.snapshot.buffers) <= set(theirs.weights)
    for tensor, value in {**ours.snapshot.parameters, **ours.snapshot.buffers}.items():
        assert torch.equal(value, theirs.weights[tensor]), tensor
    assert ours.snapshot.moments.keys() == theirs.moments.keys()
    for tensor, value in ours.snapshot.moments.items():
        assert torch.equal(value, theirs.moments[tensor]), tensor


CLOSE = {
    "five micro-batches": plain,
    "exact": job_with(exact=True, **EVEN),
    "exact with weights": job_with(JOBS["weights as tensors"], exact=True),
    "weights as tensors": JOBS["weights as tensors"],
    "weights as floats": JOBS["weights as floats"],
    "recompute": JOBS["recompute"],
    "tied": job_with(JOBS["gpt tied"], optimizer=sgd),
    "tied, clipped, exact": job_with(JOBS["gpt tied"], optimizer=sgd, clip_norm=0.02, exact=True),
    "three tied": JOBS["tied three"],
    "tied inside a layer": job_with(JOBS["tied inside a layer"], optimizer=sgd),
    "tied and shared": job_with(JOBS["tied and shared"], optimizer=sgd),
    "batch norm": job_with(JOBS["batch norm"], optimizer=sgd),
    "batch norm, recomputed": job_with(JOBS["batch norm recompute"], optimizer=sgd),
    "batch norm, passed twice": job_with(JOBS["batch norm twice"], optimizer=sgd),
    "batch norm, passed by": job_with(JOBS["stochastic depth"], optimizer=sgd),
    "batch norm of one's own": job_with(JOBS["batch norm of one's own"], optimizer=sgd),
    "instance norm": job_with(JOBS["instance norm"], optimizer=sgd),
    "tied and frozen": JOBS["tied and frozen"],
    "tied, in other memory": JOBS["tied, in other memory"],
    "views": job_with(JOBS["views"], optimizer=sgd),
    "complex": job_with(JOBS["complex"], optimizer=sgd),
    "a layer that stops the gradient": job_with(job_around(Dense, Dense), optimizer=sgd),
}


@pytest.mark.parametrize("name", CLOSE)
def test_the_reference_is_the_plain_loop_to_rounding(name: str) -> None:
    ours, theirs = both(CLOSE[name])
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=0)
    for tensor, value in {**ours.snapshot.parameters, **ours.snapshot.buffers}.items():
        torch.testing.assert_close(value, theirs.weights[tensor], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_norm_that_was_not_called_does_not_change(momentum: float | None) -> None:
    norm = nn.BatchNorm1d(3, momentum=momentum)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    (nothing,) = buffer_statistics.gather_statistics([norm], {})
    buffer_statistics.apply_to_buffers(norm, nothing)
    torch.testing.assert_close(dict(norm.state_dict()), before, rtol=0, atol=0)


def test_losses_are_added_one_after_the_other_in_every_version_of_python() -> None:
    assert sequential_sum([1e16, 1.0, -1e16]) == 0.0
