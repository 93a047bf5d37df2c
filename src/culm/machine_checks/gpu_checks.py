"""The checks of `culm doctor` for GPUs. Without a GPU there is one result, and nothing is wrong."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from culm.device.device_sums import REFUSED_NCCL
from culm.device.host_memory import machine_memory_bytes, usable_memory_bytes
from culm.machine_checks.check_result import CheckResult
from culm.providers.kill_injection import uses_mps

_MIN_LOCKED_BYTES = 1 << 30


@dataclass(frozen=True)
class GpuFacts:
    """What is known of the GPUs of a machine."""

    names: Sequence[str] = ()
    cuda: str | None = None
    """The version that torch was built for; None: torch was built without CUDA."""
    driver: str | None = None
    nccl: tuple[int, ...] | None = None
    unreachable_peers: Sequence[tuple[int, int]] = ()
    """Pairs of GPUs of which one cannot read the memory of the other."""
    uses_mps: bool = False
    lockable_bytes: int = -1
    """Limit of locked memory; negative: there is none."""
    machine_bytes: int = 0
    usable_bytes: int = 0
    """Memory that this process may use: less than that of the machine in a container with a limit."""
    locks_memory: bool = True
    """Whether a page-locked buffer could be allocated."""


def check_gpus(facts: GpuFacts) -> Iterator[CheckResult]:
    """Judge the facts."""
    yield _check_devices(facts)
    if not facts.names:
        return
    if facts.nccl is not None:
        yield _check_nccl(facts.nccl)
    yield _check_locked_memory(facts)
    if len(facts.names) > 1:
        yield _check_peers(facts)
    if facts.uses_mps:
        yield CheckResult(
            "mps",
            "weak",
            "GPUs are shared through MPS",
            "an error of one process, or its SIGKILL during a kernel, ends the other processes of the GPU, too",
        )


def _check_devices(facts: GpuFacts) -> CheckResult:
    if facts.names:
        kinds = ", ".join(f"{facts.names.count(name)} x {name}" for name in dict.fromkeys(facts.names))
        return CheckResult("gpu", "good", f"{kinds}, driver {facts.driver or 'unknown'}, CUDA {facts.cuda}")
    if facts.driver is None:
        return CheckResult("gpu", "good", "none: workers compute on the CPU")
    if facts.cuda is None:
        fix = "install a build of torch with CUDA"
        return CheckResult("gpu", "weak", f"driver {facts.driver}, and torch was built without CUDA", fix)
    what = f"driver {facts.driver}, and torch (CUDA {facts.cuda}) finds no GPU"
    return CheckResult("gpu", "weak", what, "see nvidia-smi and CUDA_VISIBLE_DEVICES, or update the driver")


def _check_nccl(found: tuple[int, ...]) -> CheckResult:
    version = ".".join(map(str, found))
    if REFUSED_NCCL[0] <= found <= REFUSED_NCCL[1]:
        return CheckResult(
            "nccl", "weak", f"{version} is refused for sums over GPUs", "Gloo is used instead; install 2.28.9 or newer"
        )
    return CheckResult("nccl", "good", version)


def _check_locked_memory(facts: GpuFacts) -> CheckResult:
    if not facts.locks_memory:
        return CheckResult("pinned", "weak", "no page-locked memory: copies are slow", "ulimit -l unlimited")
    if facts.usable_bytes < facts.machine_bytes:
        what = f"a control group allows {_gib(facts.usable_bytes)} of {_gib(facts.machine_bytes)}"
        return CheckResult("pinned", "good", f"{what}; workers lock at most a quarter of it")
    if 0 <= facts.lockable_bytes < _MIN_LOCKED_BYTES:
        what = f"{facts.lockable_bytes / 2**20:,.0f} MiB may be locked"
        return CheckResult("pinned", "good", f"{what}; the driver locks more")
    return CheckResult("pinned", "good", "page-locked memory is available")


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _check_peers(facts: GpuFacts) -> CheckResult:
    if facts.unreachable_peers:
        pairs = ", ".join(f"{one} from {other}" for other, one in facts.unreachable_peers[:4])
        return CheckResult("peers", "good", f"no direct access to GPU {pairs}; frames go through host memory anyway")
    return CheckResult("peers", "good", "each GPU reaches the memory of the others")


def find_gpu_facts() -> GpuFacts:
    """The facts of this machine. Raises nothing: what cannot be found out is left out."""
    import torch

    from culm.runtime.compute.device import driver_version

    driver, cuda = driver_version(), torch.version.cuda
    if not torch.cuda.is_available():
        return GpuFacts(driver=driver, cuda=cuda)
    count = torch.cuda.device_count()
    return GpuFacts(
        names=[torch.cuda.get_device_name(index) for index in range(count)],
        cuda=cuda,
        driver=driver,
        nccl=_nccl_version(),
        unreachable_peers=[
            pair for pair in permutations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)
        ],
        uses_mps=uses_mps(),
        lockable_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        machine_bytes=machine_memory_bytes(),
        usable_bytes=usable_memory_bytes(),
        locks_memory=_locks_memory(),
    )


def _nccl_version() -> tuple[int, ...] | None:
    import torch

    try:
        return tuple(torch.cuda.nccl.version())
    except Exception:  # a build without NCCL
        return None


def _locks_memory() -> bool:
    import torch

    try:
        return torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True).is_pinned()
    except RuntimeError:
        return False
