"""Cross entropy in chunks equals torch's up to rounding, and needs less memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.runtime.sample_jobs import job_with, tiny_gpt
from torch import Tensor
from torch.nn import functional

from culm.errors import JobError
from culm.models import chunked_cross_entropy
from culm.testing import reference, simulate


def loss_and_gradient(loss: Any, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    (3 * value).backward()
    assert leaf.grad is not None
    return value.detach(), leaf.grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 100, None])
def test_it_equals_the_loss_of_torch(reduction: Any, chunk: int | None) -> None:
    torch.manual_seed(0)
    logits, target = 10 * torch.randn(7, 50), torch.randint(50, (7,))
    target[[1, 5]] = -100
    options = {"reduction": reduction}
    value, gradient = loss_and_gradient(partial(chunked_cross_entropy, chunk=chunk, **options), logits, target)
    expected, expected_gradient = loss_and_gradient(partial(functional.cross_entropy, **options), logits, target)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    assert not gradient[[1, 5]].any()


def test_it_keeps_the_shape_of_a_batch_of_sequences_and_the_type_of_the_logits() -> None:
    logits, target = torch.randn(2, 3, 11, dtype=torch.bfloat16), torch.randint(11, (2, 3))
    value, gradient = loss_and_gradient(chunked_cross_entropy, logits, target)
    expected, expected_gradient = loss_and_gradient(
        lambda x, y: functional.cross_entropy(x.flatten(0, 1).float(), y.flatten()), logits, target
    )
    assert value.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-2, atol=1e-3)


def test_double_precision_passes_the_check_of_the_gradient() -> None:
    logits, target = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.tensor([0, 3, -100, 1, 2])
    assert torch.autograd.gradcheck(lambda x: chunked_cross_entropy(x, target, chunk=2), (logits,))


def test_targets_of_another_shape_are_refused() -> None:
    with pytest.raises(JobError, match=r"has shape \(2,\), and the logits have \(3, 4\)"):
        chunked_cross_entropy(torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64))


def test_the_backward_keeps_no_copy_of_the_logits_in_32_bits() -> None:
    logits, target = torch.randn(64, 512, dtype=torch.bfloat16, requires_grad=True), torch.randint(512, (64,))
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        chunked_cross_entropy(logits, target, chunk=8)
    assert max(t.nbytes for t in kept if t.data_ptr() != logits.data_ptr()) < logits.nbytes / 8


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_a_pipeline_trains_as_one_process_with_it(schedule: str) -> None:
    job = job_with(tiny_gpt, loss=partial(chunked_cross_entropy, chunk=3), exact=True, steps=2)
    assert simulate(job, pipelines=2, stages=2, schedule=schedule).state_sha256 == reference(job).state_sha256
