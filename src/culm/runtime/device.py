"""Where a process computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from culm.job import Job


def device_of(job: Job) -> torch.device:
    """The device that a job asks for; with `auto` a GPU, if there is one."""
    if job.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(job.device)
