"""What the machines of one job must agree on: source code, layers, data, versions of libraries, kind of machine."""

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

from culm.cluster.prepare_run import inspect_layers
from culm.data.stream import Stream
from culm.errors import UsageError
from culm.job import import_root
from culm.metric import declared_metrics
from culm.runtime.compute.batch_loading import load_micro_batch
from culm.runtime.compute.device import fingerprint, select_device
from culm.transport.frames.frame_codec import tensor_bytes, to_gapless_cpu
from culm.version import __version__

if TYPE_CHECKING:
    from culm.job import Job

_DIGEST_DIGITS = 12
_PACKAGES = ("culm", "torch", "numpy")
"""Names in an identity that are versions of packages."""


def job_identity(job: Job, reference: str) -> dict[str, str]:
    """Names and values that must be equal on all machines of the job. `reference`: FILE[:function]."""
    layers = inspect_layers(job).profile.layers
    shapes = "|".join(f"{layer.name} {layer.parameter_bytes} {layer.output_bytes}" for layer in layers)
    return {
        "culm": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        **_source_digests(Path(reference.partition(":")[0]).resolve()),
        "layers": f"{len(layers)} ({_digest(shapes.encode())})",
        "batch": f"{job.global_batch} in micro-batches of {job.micro_batch}, seed {job.seed}, {job.precision}",
        **({"metrics": _metrics_text(job)} if job.metrics else {}),
        "data": f"{_data_size(job)} ({_data_digest(job)} in the first micro-batch)",
        "machine": fingerprint(job) if job.exact else select_device(job).type,
    }


def check_identity(own: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise UsageError, one sentence with every difference, unless this machine would train the same."""
    names = [*expected, *(name for name in own if name not in expected)]
    differences = [
        f"{name} is {own.get(name, 'not there')} here and {expected.get(name, 'not there')} in the job"
        for name in names
        if own.get(name) != expected.get(name)
    ]
    if differences:
        packages = [
            f"{name}=={expected[name]}" for name in _PACKAGES if name in expected and own.get(name) != expected[name]
        ]
        fix = f"install {' '.join(packages)} here" if packages else "make them the same"
        raise UsageError(f"this machine cannot join: {'; '.join(differences)}; {fix}")


def _source_digests(file: Path) -> dict[str, str]:
    """Digests of the job's file and of the modules that it imported from its own folder or package."""
    found, top = {file}, import_root(file)
    folder = top / file.relative_to(top).parts[0] if top != file.parent else top
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and folder in Path(path).parents and "site-packages" not in path:
            found.add(Path(path))
    return {f"file {os.path.relpath(path, file.parent)}": _digest(path.read_bytes()) for path in sorted(found)}


def _metrics_text(job: Job) -> str:
    """Names and reductions: the layout of the vector in which named values are reduced."""
    return ", ".join(f"{name} {metric.reduce}" for name, metric in declared_metrics(job.metrics).items())


def _data_size(job: Job) -> str:
    return "a stream" if isinstance(job.data, Stream) else f"{len(job.data)} items"


def _data_digest(job: Job) -> str:
    inputs, target, _ = load_micro_batch(job, 0, 0, torch.device("cpu"))
    return _digest(repr((_hashable_values(inputs), _hashable_values(target))).encode())


def _hashable_values(sample: object) -> object:
    """The sample with every tensor replaced by its type, shape and digest."""
    if isinstance(sample, torch.Tensor):
        return str(sample.dtype), tuple(sample.shape), _digest(bytes(tensor_bytes(to_gapless_cpu(sample))))
    if isinstance(sample, Mapping):
        return {name: _hashable_values(value) for name, value in sample.items()}
    return [_hashable_values(value) for value in sample] if isinstance(sample, (list, tuple)) else sample


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGEST_DIGITS]
