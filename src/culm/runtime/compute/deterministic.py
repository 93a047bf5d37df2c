"""Deterministic kernels on a GPU: some operations choose among kernels that add in another order each time.

On a CPU with a fixed number of threads every kernel is deterministic, and nothing changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from culm.errors import CulmError, JobError, LayerFailed
from culm.runtime.compute import buffer_statistics
from culm.runtime.compute.batch_loading import load_micro_batch
from culm.runtime.compute.model_state import LayerReplica, build_layer
from culm.runtime.compute.rng import derive_seed
from culm.runtime.compute.user_code import call_layer, compute_loss, detach_contiguous

if TYPE_CHECKING:
    from torch import Tensor

    from culm.job import Job

_CUBLAS_CONFIG = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_CONFIGS = (":4096:8", ":16:8")
"""With one of these, cuBLAS is deterministic also when several streams use it."""


def use_exact_algorithms(job: Job, device: torch.device) -> None:
    """In an `exact` run on a GPU: let this process use deterministic algorithms only, and raise in operations without
    one. To be called before the first product of matrices on the GPU."""
    if not job.exact or not chooses_kernels(device):
        return
    if os.environ.get(_CUBLAS_CONFIG) not in _CUBLAS_CONFIGS:
        os.environ[_CUBLAS_CONFIG] = _CUBLAS_CONFIGS[0]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)


def chooses_kernels(device: torch.device) -> bool:
    """Whether results may depend on which kernels are chosen, or on the order in which these add."""
    return device.type == "cuda"


@contextmanager
def exact_algorithms(job: Job, device: torch.device) -> Iterator[None]:
    """While this is open, an `exact` job uses the algorithms of `use_exact_algorithms`."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
    )
    use_exact_algorithms(job, device)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before[2:]


def check_determinism(job: Job, device: torch.device) -> None:
    """Run forward and backward of each layer, and the loss, on micro-batch 0. Raises JobError, which names the
    operation and the layer, for an operation without a deterministic implementation on this device."""
    with exact_algorithms(job, device):
        _check_layers(job, device)


def _check_layers(job: Job, device: torch.device) -> None:
    values, target, _ = load_micro_batch(job, 0, 0, device)
    cast: AbstractContextManager[Any] = nullcontext()
    if job.precision == "bf16":
        cast = torch.autocast(device.type, torch.bfloat16)
    for index in range(len(job.layers)):
        layer = LayerReplica(job, index, build_layer(job, index).to(device), {})
        inputs = tuple(v.detach().requires_grad_(v.is_floating_point() and index > 0) for v in values)
        with _naming(layer.label), cast, buffer_statistics.RecordCollector():
            outputs = call_layer(layer, inputs, derive_seed(job.seed, 0, 0, index))
        with _naming(layer.label):
            _run_backward(outputs, [*inputs, *layer.trainable.values()])
        values = tuple(detach_contiguous(value) for value in outputs)
    ends = tuple(value.requires_grad_(value.is_floating_point()) for value in values)
    with _naming("the loss"):
        with cast:
            loss, _ = compute_loss(job, ends, target, derive_seed(job.seed, 0, 0, len(job.layers)))
        _run_backward((loss,), list(ends))


def _run_backward(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    ends = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if ends and wanted:
        torch.autograd.grad(ends, wanted, [torch.ones_like(end) for end in ends], allow_unused=True)


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """Turn torch's error about an operation without a deterministic implementation into one that names the part."""
    try:
        yield
    except (RuntimeError, CulmError) as error:
        operation = _nondeterministic_operation(error)
        if operation is None and not isinstance(error, CulmError):
            raise LayerFailed(f"the backward of {part} raised {error}") from error
        if operation is None:
            raise
        raise JobError(
            f"{part} uses {operation}, which has no deterministic implementation on this device: exact runs need one; "
            "use another operation, or train without exact"
        ) from error


def _nondeterministic_operation(error: BaseException | None) -> str | None:
    """The operation that torch refused, in an error or in what it was raised from."""
    while error is not None:
        found = re.match(r"(\S+) does not have a deterministic implementation", str(error))
        if found:
            return found[1]
        error = error.__cause__
    return None
