"""Checks of `culm doctor`: libraries, limits, an etcd, and a small run that loses a node."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from culm.device.host_memory import machine_memory_bytes
from culm.errors import CulmError, RunError
from culm.machine_checks.check_result import CheckResult
from culm.machine_checks.gpu_checks import check_gpus, find_gpu_facts

if TYPE_CHECKING:
    from culm.cluster.store.etcd import EtcdAccess
    from culm.job import Job
    from culm.summary import Summary

_MIN_OPEN_FILES = 1024
"""Recommended limit of open files: a leader has two connections to each node."""
_MIN_FREE_BYTES = 1 << 30
"""Recommended free bytes in the folder for temporary files."""
_EXTRAS = {
    "planner": ("ortools",),
    "gnn": ("pymetis", "scipy"),
    "ray": ("ray",),
    "aws": ("boto3",),
    "kubernetes": ("yaml",),
}


def doctor(
    *,
    etcd: str | None = None,
    etcd_user: str | None = None,
    etcd_ca: str | None = None,
    etcd_cert: str | None = None,
    etcd_key: str | None = None,
    etcd_insecure: bool = False,
) -> list[CheckResult]:
    """Check this machine as `culm doctor` does: libraries, limits, an etcd, and a small run that loses a node.

    `etcd`: check this one, too; the other arguments are those of RunConfig. Returns a result for each check: `name`,
    `state` (good, weak or broken), `what` was found and how to `fix` it. culm cannot run here if one is broken.
    """
    from culm.providers.shared_run import etcd_access

    access = None
    if etcd is not None:
        access = etcd_access(etcd, etcd_user, etcd_ca, etcd_cert, etcd_key, insecure=etcd_insecure)
    return list(run_checks(access))


def run_checks(access: EtcdAccess | None) -> Iterator[CheckResult]:
    """Run the checks one after the other, the cheap ones first, and yield each result."""
    yield check_system(platform.system(), sys.version_info[:2])
    yield check_library("torch", _installed_version("torch"), _requirement("torch"))
    yield check_cores(len(os.sched_getaffinity(0)), machine_memory_bytes())
    yield from check_gpus(find_gpu_facts())
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_free_space(tempfile.gettempdir(), shutil.disk_usage(tempfile.gettempdir()).free)
    yield check_extras({name: all(map(importlib.util.find_spec, needs)) for name, needs in _EXTRAS.items()})
    yield _attempt_check("etcd", _private_etcd)
    if access is not None:
        yield _attempt_check("your etcd", lambda: _user_etcd(access))
    yield _attempt_check("a run", _run_with_kill)


def check_system(name: str, python: tuple[int, int]) -> CheckResult:
    what = f"{name}, Python {python[0]}.{python[1]}"
    if name != "Linux":
        return CheckResult("system", "broken", what, "culm needs Linux")
    if python > (3, 13):
        return CheckResult("system", "weak", what, "culm was tried with Python 3.11 to 3.13")
    return CheckResult("system", "good", what)


def check_library(name: str, installed: str | None, requirement: str) -> CheckResult:
    """`requirement` as in "torch<2.14,>=2.11", the form of package metadata."""
    if installed is None:
        return CheckResult(name, "broken", "not installed", f"pip install '{requirement}'")
    least, below = (
        _numbers(match[1]) if (match := re.search(f"{sign}([0-9.]+)", requirement)) else () for sign in (">=", "<")
    )
    if _numbers(installed) < least or (below and _numbers(installed) >= below):
        return CheckResult(name, "broken", installed, f"pip install '{requirement}'")
    return CheckResult(name, "good", installed)


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13, 0)."""
    return tuple(int(part) for part in re.match("[0-9.]*", version)[0].split(".") if part)  # type: ignore[index]


def check_cores(count: int, memory: int) -> CheckResult:
    what = f"{count} cores, {memory / 2**30:.0f} GiB"
    if count < 2:
        return CheckResult("machine", "weak", what, "local nodes will share one core")
    return CheckResult("machine", "good", what)


def check_open_files(limit: int) -> CheckResult:
    if 0 <= limit < _MIN_OPEN_FILES:
        return CheckResult("files", "weak", f"{limit} may be open", f"ulimit -n {_MIN_OPEN_FILES}")
    return CheckResult("files", "good", "any number may be open" if limit < 0 else f"{limit} may be open")


def check_free_space(folder: str, free: int) -> CheckResult:
    what = f"{folder} has {free / 2**30:.1f} GiB free"
    if free < _MIN_FREE_BYTES:
        return CheckResult("room", "weak", what, "set TMPDIR to a place with more")
    return CheckResult("room", "good", what)


def check_extras(installed: dict[str, bool]) -> CheckResult:
    """Missing extras are never an error: a command that needs one names it."""
    missing = [name for name, found in installed.items() if not found]
    if missing:
        return CheckResult(
            "extras", "good", f"without {', '.join(missing)}", f"pip install 'culm[{','.join(missing)}]'"
        )
    return CheckResult("extras", "good", ", ".join(installed))


def _attempt_check(name: str, attempt: Callable[[], str]) -> CheckResult:
    try:
        return CheckResult(name, "good", attempt())
    except CulmError as error:
        return CheckResult(name, "broken", str(error))


def _private_etcd() -> str:
    from culm.providers.private_etcd import PrivateEtcd
    from culm.training import run_blocking

    async def main() -> str:
        began = time.perf_counter()
        async with PrivateEtcd() as etcd:
            up = time.perf_counter() - began
            return f"a private etcd started in {up:.1f} s, {await _time_etcd_writes(etcd.access)}"

    return run_blocking(main())


def _user_etcd(access: EtcdAccess) -> str:
    from culm.training import run_blocking

    return run_blocking(_time_etcd_writes(access))


async def _time_etcd_writes(access: EtcdAccess) -> str:
    """Write ten times under a job name of its own, delete the keys, and return the median time as text."""
    from culm.cluster.store.etcd import EtcdStore
    from culm.cluster.timeouts import derive_timeouts

    notes: list[str] = []
    async with await EtcdStore.open(
        access, f"doctor-{os.getpid()}", timeouts=derive_timeouts(5.0), log=notes.append
    ) as store:
        took = []
        for _ in range(10):
            began = time.perf_counter()
            await store.put("probe", b"x" * 1000)
            took.append(time.perf_counter() - began)
        await store.delete_all()
    return "; ".join([f"a write takes {sorted(took)[len(took) // 2] * 1e3:.1f} ms", *notes])


def _run_with_kill() -> str:
    """Run two nodes, on the GPU if there is one, and kill one. Raises RunError unless the weights equal those of a
    single process, or on a GPU, whose kernels compute other bits than a CPU, those of a failure-free run."""
    from culm import training
    from culm.runtime.compute.device import fingerprint, select_device
    from culm.testing import reference

    job = _small_job()
    on_gpu = select_device(job).type != "cpu"

    def run(*kills: str) -> Summary:
        return training.train(job, pipelines=2, stages=1, strategy="reroute", kills=kills, progress=False)

    began = time.perf_counter()
    summary = run("node=1 step=1 at=0B2")
    took = time.perf_counter() - began
    peer = "a failure-free run" if on_gpu else "a single process"
    expected = run().weights_sha256 if on_gpu else reference(job).weights_sha256
    if summary.preemptions != 1 or summary.weights_sha256 != expected:
        raise RunError(f"after the loss of a node the weights differ from those of {peer}: please report this")
    where = fingerprint(job) if on_gpu else f"the CPU, as there is no GPU: {fingerprint(job)}"
    return f"one of two nodes was killed, and the weights equal those of {peer}: {took:.1f} s on {where}"


def _small_job() -> Job:
    import torch

    from culm.job import Job
    from culm.models import RandomTokens, gpt, gpt_loss

    return Job(
        layers=gpt("nano", vocab=16),
        loss=gpt_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        data=RandomTokens(vocab=16, length=16, count=64),
        global_batch=8,
        micro_batch=2,
        steps=4,
        exact=True,
    )


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _requirement(name: str) -> str:
    """The requirement of culm's package metadata for a library; without a version where culm runs from its sources and
    is not installed."""
    try:
        stated = requires("culm") or ()
    except PackageNotFoundError:
        return name
    return next((text for text in stated if re.match(f"{name}[^a-z_-]", text)), name)
