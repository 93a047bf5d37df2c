"""Sums over several GPUs with torch's ProcessGroupNCCL, each group on a stream of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from culm.device.cuda_streams import CudaStream
from culm.device.device_sums import KeptCommunicators, NcclSupport
from culm.device.nccl_settings import HOST_ID

if TYPE_CHECKING:
    from torch import Tensor

    from culm.device.streams import DeviceEvent, DeviceStream
    from culm.transport.collectives.member_store import Rendezvous

_NEVER = timedelta(days=1)


class NcclSums:
    """The sums of one GPU with others."""

    def __init__(self, device: torch.device, compute: DeviceStream, *, polls: bool = False) -> None:
        """`compute`: the stream whose results are summed. `polls`: see CudaStreams."""
        self._device, self._compute, self._polls = device, compute, polls
        self.kept = KeptCommunicators()

    def support(self) -> NcclSupport:
        from torch import distributed as dist

        has_nccl = dist.is_available() and dist.is_nccl_available()
        if not has_nccl or not hasattr(torch._C._distributed_c10d, "ProcessGroupNCCL"):
            return NcclSupport("this build of torch has no NCCL that culm knows")
        try:
            version = tuple(int(part) for part in torch.cuda.nccl.version()[:3])
            gpu = str(torch.cuda.get_device_properties(self._device).uuid)
        except (RuntimeError, AttributeError, ValueError, TypeError) as error:
            return NcclSupport(f"NCCL cannot be used: {error}")
        return NcclSupport(version=version, gpu=gpu, host_id=os.environ.get(HOST_ID, ""))

    def connect(self, rendezvous: Rendezvous) -> NcclCommunicator:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupNCCL

        torch.cuda.set_device(self._device)  # of this thread
        nccl: Any = ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _NEVER
        store = PrefixStore("nccl", rendezvous.store)
        group = nccl(store, rendezvous.rank, rendezvous.size, options)
        stream = CudaStream(self._device, torch.cuda.Stream(self._device), polls=self._polls)
        return NcclCommunicator(group, (rendezvous.store, store), self._compute, stream)


class NcclCommunicator:
    """One group."""

    def __init__(self, group: Any, stores: tuple[Any, ...], compute: DeviceStream, stream: CudaStream) -> None:
        """`stores` are kept as long as the group, which uses them."""
        self._group, self._stores, self._compute, self._stream = group, stores, compute, stream

    def make_first_sum(self, size: int) -> None:
        device, stream = self._stream.device, self._stream.cuda
        torch.cuda.set_device(device)  # of this thread
        one = torch.ones(1, device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        self._queue([one])
        stream.synchronize()
        if one.item() != size:
            raise RuntimeError(f"the sum of {size} ones is {one.item():g}")

    def launch(self, tensors: Sequence[Tensor]) -> DeviceEvent:
        self._stream.wait_event(self._compute.record())
        self._queue(tensors)
        return self._stream.record()

    def _queue(self, tensors: Sequence[Tensor]) -> None:
        """Queue sums on the stream of the group."""
        with self._stream.active():
            for tensor in tensors:
                work = self._group.allreduce([tensor])
                if work is not None:
                    work.wait()  # the stream of the group waits for that of NCCL, and the host for nothing

    def find_error(self) -> str:
        error = self._group.get_error()
        return "" if getattr(error, "name", str(error)) == "SUCCESS" else f"NCCL reports {_name_of(error)}"

    def abort(self) -> None:
        self._group.abort()
        self._stream.cuda.synchronize()
        self._stream.close()


def _name_of(error: Any) -> str:
    return str(getattr(error, "name", error)).lower().replace("_", " ")
