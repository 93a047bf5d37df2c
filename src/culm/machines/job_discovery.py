"""Find the job that a machine joins, among the jobs in an etcd."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
from culm.cluster.store.etcd.etcd_messages import RangeAnswer, prefix_end
from culm.cluster.timeouts import derive_timeouts
from culm.errors import UsageError
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from culm.cluster.store.etcd import EtcdAccess

DEFAULT_WAIT_S = 600.0
_CONNECT_TIMEOUT_S = 5.0
_POLL_S = 0.5
_REMIND_S, _MAX_REMIND_S = 30.0, 3600.0
"""Time between the first two sentences about what is waited for, and the longest one."""


async def find_job(access: EtcdAccess, name: str, wait_s: float | None, on_line: Callable[[str], None]) -> str:
    """The name of the job to join: `name`, or the only job if it is empty.

    Waits for a job up to `wait_s` seconds (math.inf: for ever). With None it waits ten minutes if there is no job at
    all, and not at all if there are others: then the name is likely a typing error. Raises UsageError if the job does
    not appear.
    """
    clock = RealClock()
    gateway = EtcdGateway(access, clock, attempt_timeout_s=derive_timeouts().store_call, log=on_line)
    try:
        await gateway.find_endpoint(_CONNECT_TIMEOUT_S)
        limit_s = DEFAULT_WAIT_S if wait_s is None else wait_s
        started = time.monotonic()
        remind_at, remind_s = 0.0, _REMIND_S
        while True:
            jobs = await _list_jobs(gateway)
            found = choose_job(jobs, name, waits=wait_s is not None)
            waited_s = time.monotonic() - started
            if found is not None:
                return found
            if waited_s >= limit_s:
                raise UsageError(f"no {_job_words(name)} was started within {limit_s:.0f} s: {_known_words(jobs)}")
            if waited_s >= remind_at:
                remind_at, remind_s = waited_s + remind_s, min(_MAX_REMIND_S, 2 * remind_s)
                until = f", up to {limit_s - waited_s:.0f} s" if math.isfinite(limit_s) else ""
                on_line(f"waiting for {_job_words(name)} to be started with culm run{until}")
            await clock.sleep(_POLL_S)
    finally:
        await gateway.close()


def choose_job(jobs: Sequence[str], name: str, *, waits: bool) -> str | None:
    """The job to join, or None if it may still be started. Raises UsageError if no choice is possible."""
    if name in jobs:
        return name
    if not name and len(jobs) == 1:
        return jobs[0]
    if not name and jobs:
        raise UsageError(f"--job is missing, and there are several: {_known_words(jobs)}")
    if jobs and not waits:
        raise UsageError(
            f"--job is {name!r}, and there is no such job: {_known_words(jobs)}; use --wait SECONDS to wait for it"
        )
    return None


async def _list_jobs(gateway: EtcdGateway) -> list[str]:
    """The jobs whose launcher or nodes are there."""
    prefix = b"culm/"
    request = {"key": prefix, "range_end": prefix_end(prefix), "keys_only": True}
    keys = [kv.key.decode() for kv in (await gateway.call("/v3/kv/range", request, RangeAnswer)).kvs]
    parts = [key.split("/", 3) for key in keys]
    return sorted({part[1] for part in parts if part[2:3] == ["key"] and part[3:] == ["job"]})


def _job_words(name: str) -> str:
    return f"job {name!r}" if name else "job"


def _known_words(jobs: Sequence[str]) -> str:
    return f"the known jobs are {', '.join(jobs)}" if jobs else "there is no job in this store"
