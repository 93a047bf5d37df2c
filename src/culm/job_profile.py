"""`culm.profile`: measure what each layer of a job costs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from culm.errors import UsageError
from culm.job import Job, call_job_function, replace_fields

if TYPE_CHECKING:
    from culm.plan import Profile


def profile(
    job: Job | Callable[[], Job] | str,
    *,
    overrides: Mapping[str, Any] | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> Profile:
    """Measure the time and memory of each layer of a job, one after the other in this process, as `culm profile` does.

    `job`: a Job, a function that returns one, or "FILE[:function]". `overrides` replaces fields of it, such as
    {"device": "cpu"}. `progress` is called with a text, the layers done and all layers. The result has the `layers`,
    and `save(path)` writes it for `culm.train(profile=path)` and `culm plan --profile`. Raises UsageError if the device
    is not there, and JobError if the layers do not fit together.
    """
    progress("importing torch and the job", 0, 0)
    from culm.cluster.prepare_run import inspect_layers
    from culm.runtime.compute.layer_profiler import profile_layers

    described = call_job_function(job) if isinstance(job, str) else job() if callable(job) else job
    described = replace_fields(described, overrides or {})
    _check_device(described.device)
    inspect_layers(described)  # report layers that do not fit together as an error in the job before measuring anything
    return profile_layers(described, progress=progress)


def _check_device(device: str) -> None:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this machine has no CUDA device that torch can use: use --device cpu")
