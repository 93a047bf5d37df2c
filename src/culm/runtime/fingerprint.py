"""What exact results depend on besides the job: nodes of one exact run must agree on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from culm.runtime.device import device_of

if TYPE_CHECKING:
    from culm.job import Job


def fingerprint(job: Job) -> str:
    """Device or CPU capability, libraries and threads: 1 and 2 threads differ in LayerNorm, convolution and sums."""
    device = device_of(job)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    blas = "mkl" if torch.backends.mkl.is_available() else "other"
    return f"torch {torch.__version__}, {where}, {blas}, {job.threads} threads"
