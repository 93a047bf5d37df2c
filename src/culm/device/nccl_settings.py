"""The environment in which a worker uses NCCL."""

from __future__ import annotations

import os

HOST_ID = "NCCL_HOSTID"
TORCH_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # no thread of torch aborts a group or ends the process: culm decides
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
"""Environment variables that torch reads when a group is created."""


def configure_nccl(worker: int, *, shares_gpu: bool, within_machine: bool) -> None:
    """Set the environment of a worker process before it uses NCCL. `shares_gpu`: other workers use its GPU, so that it
    has to look like a host of its own to NCCL. `within_machine`: all workers are on this machine."""
    os.environ |= TORCH_SETTINGS
    if shares_gpu and HOST_ID not in os.environ:
        os.environ[HOST_ID] = f"culm-{worker}-{os.getpid()}"
        os.environ.setdefault("NCCL_NET", "Socket")
        if within_machine:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
