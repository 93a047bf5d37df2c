"""What nodes of one job must agree on beside the job's name: code, layers, data, libraries, and how they compute."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch

import culm
from culm.cluster.prepare import look
from culm.errors import UsageError
from culm.job import home
from culm.runtime.data import micro_batch
from culm.runtime.device import device_of
from culm.runtime.fingerprint import fingerprint
from culm.transport.wire import in_one_piece, tensor_bytes

if TYPE_CHECKING:
    from culm.job import Job

_DIGITS = 12


def identity(job: Job, reference: str) -> dict[str, str]:
    """By name, in words that two machines can be compared by. `reference`: FILE[:function]."""
    layers = look(job).profile.layers
    shapes = "|".join(f"{layer.name} {layer.parameter_bytes} {layer.output_bytes}" for layer in layers)
    return {
        "culm": culm.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        **_sources(Path(reference.partition(":")[0]).resolve()),
        "layers": f"{len(layers)} ({_digest(shapes.encode())})",
        "batch": f"{job.global_batch} in micro-batches of {job.micro_batch}, seed {job.seed}, {job.precision}",
        "data": f"{len(job.data)} items ({_data_digest(job)} in the first micro-batch)",
        "machine": fingerprint(job) if job.exact else device_of(job).type,
    }


def check_identity(mine: Mapping[str, str], jobs: Mapping[str, str]) -> None:
    """UsageError, one sentence with every difference, for a machine that would learn something else."""
    names = [*jobs, *(name for name in mine if name not in jobs)]
    told = [
        f"{name} is {mine.get(name, 'not there')} here and {jobs.get(name, 'not there')} in the job"
        for name in names
        if mine.get(name) != jobs.get(name)
    ]
    if told:
        raise UsageError(f"this machine can not join: {'; '.join(told)}; make them the same")


def _sources(file: Path) -> dict[str, str]:
    """The job's file, and all that it imported from its own folder or package."""
    found, top = {file}, home(file)
    folder = top / file.relative_to(top).parts[0] if top != file.parent else top
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and folder in Path(path).parents and "site-packages" not in path:
            found.add(Path(path))
    return {f"file {os.path.relpath(path, file.parent)}": _digest(path.read_bytes()) for path in sorted(found)}


def _data_digest(job: Job) -> str:
    inputs, target = micro_batch(job, 0, 0, torch.device("cpu"))
    return _digest(repr((_values(inputs), _values(target))).encode())


def _values(found: object) -> object:
    """Tensors as their bytes, wherever they lie in a sample."""
    if isinstance(found, torch.Tensor):
        return str(found.dtype), tuple(found.shape), _digest(bytes(tensor_bytes(in_one_piece(found))))
    if isinstance(found, Mapping):
        return {name: _values(value) for name, value in found.items()}
    return [_values(value) for value in found] if isinstance(found, (list, tuple)) else found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
