"""The compute device of a process, and what exact results depend on besides the job."""

from __future__ import annotations

import errno
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from culm.errors import JobError
from culm.plan.model.accelerators import USABLE_MEMORY_SHARE
from culm.text_format import count_noun

if TYPE_CHECKING:
    from culm.job import Job

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED")
"""In the text of a RuntimeError: of torch's allocator for the CPU, of CUDA outside of torch's allocator, of cuBLAS and
of cuDNN."""


def select_device(job: Job, index: int = 0) -> torch.device:
    """The device that a job asks for; with `auto` a GPU, if there is one.

    `index`: the number of the worker on its node. Worker i uses GPU i, unless the job names a GPU by number. Raises
    JobError for a GPU that is not there.
    """
    if job.device == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    else:
        device = torch.device(job.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JobError(
            f"Job.device is {job.device!r}, and torch finds no GPU on this machine: use device='auto' or 'cpu', or "
            "check the driver with culm doctor"
        )
    if device.type != "cuda" or device.index is not None or index == 0:
        return device
    count = torch.cuda.device_count()
    if index >= count:
        raise JobError(
            f"worker {index} of a node needs GPU {index}, and the node has {count_noun(count, 'GPU')}: "
            f"use --workers-per-node {max(1, count)}, or --set device=cuda:0 to share one"
        )
    return torch.device("cuda", index)


def gpus_for_workers(job: Job) -> int:
    """How many workers of this job can have a GPU of this machine of their own; 0: they compute on the CPU, or the job
    names one GPU for all. CUDA is not initialised."""
    device = torch.device("cuda" if job.device == "auto" else job.device)
    return torch.cuda.device_count() if device.type == "cuda" and device.index is None else 0


def activate_device(device: torch.device) -> None:
    """Make a GPU that was selected by number the current one of this thread, for code that names no GPU. Each thread
    starts with GPU 0."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def usable_device_bytes(device: torch.device) -> int:
    """Memory of a GPU, without the share that context, libraries and fragmentation take."""
    return int(USABLE_MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)


def device_identifier(device: torch.device | None) -> str:
    """The UUID of a GPU, or its name if the driver does not answer; empty for the CPU."""
    if device is None or device.type != "cuda":
        return ""
    try:
        return str(torch.cuda.get_device_properties(device).uuid)
    except Exception:  # the GPU may be the reason why this is called
        return str(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there is too little memory. The allocator of the CPU and some libraries of a GPU
    have no class of their own for that: they raise a RuntimeError."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def empty_cache(device: torch.device | None) -> None:
    """Return memory that torch keeps for later allocations to the device."""
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.empty_cache()


def fingerprint(job: Job) -> str:
    """Device or CPU capability, libraries and threads. All nodes of an exact run must agree on it: LayerNorm,
    convolution and sums differ between 1 and 2 threads. Kernels depend on the model of a GPU, may depend on its number
    of multiprocessors (a slice of a GPU has fewer), and come with CUDA, cuDNN and the driver."""
    device = select_device(job)
    blas = "mkl" if torch.backends.mkl.is_available() else "other"
    return f"torch {torch.__version__}, {_hardware(device)}, {blas}, {job.threads} threads"


def _hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return torch.backends.cpu.get_cpu_capability()
    properties = torch.cuda.get_device_properties(device)
    versions = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, driver {driver_version()}"
    return f"{properties.name} with {properties.multi_processor_count} multiprocessors, {versions}"


def driver_version() -> str | None:
    """The version of the NVIDIA driver; None: there is none."""
    try:
        text = _DRIVER_FILE.read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else "unknown"
