"""The jobs that run on this machine, and its launches: whether they still run, and what their machines cost."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass

from culm.errors import CulmError
from culm.machines.head_registry import KEPT_S, HeadLaunch, forget_head_launch, known_head_launches
from culm.machines.launch_registry import FoundLaunch, known_launches
from culm.machines.machine_provider import Machine
from culm.machines.remote_head import list_on_head
from culm.providers.supervisor.run_registry import FoundJob, known_jobs

_TIMEOUT_S = 20.0
"""Limit for an engine to list its machines."""


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """A running job, or a launch that may still have machines: a row of `culm list`."""

    job: str
    """Its name, as for `culm.attach`."""
    launch: str
    """Name of the launch; empty: a job of this machine that was not launched."""
    on: str
    """The provider."""
    wanted: int
    """How many machines the run should have."""
    running: int
    pending: int
    usd_per_h: float | None
    """Dollars per hour of all machines now; None: not known."""
    seconds: float
    """Since the start."""
    supervised: bool | None
    """Whether its supervisor lives. If not, only `culm.down` ends its machines. None: its head does not answer."""
    problem: str
    """Empty: none is known."""
    head: str = ""
    """The machine on which its store and supervisor are; empty: this one."""


async def find_jobs() -> list[JobStatus]:
    """The launches from this machine that may still have machines, then the other jobs that run on this machine."""
    on_heads = [asyncio.to_thread(_describe_on_head, head) for head in known_head_launches()]
    found = await asyncio.gather(*map(_describe_launch, known_launches()), *on_heads)
    launched = [each for each in found if each is not None]
    names = {each.job for each in launched}
    return launched + [_describe_job(job) for job in known_jobs() if job.running and job.entry.name not in names]


def _describe_job(job: FoundJob) -> JobStatus:
    return JobStatus(
        job=job.entry.name,
        launch="",
        on="this machine",
        wanted=1,
        running=1,
        pending=0,
        usd_per_h=0.0,
        seconds=time.time() - job.entry.started_at,
        supervised=True,
        problem="",
    )


def _describe_on_head(head: HeadLaunch) -> JobStatus | None:
    """A launch whose store and supervisor are on another machine; None: it has ended."""
    try:
        row = list_on_head(head)
    except CulmError as error:
        return JobStatus(
            job=head.job,
            launch=head.launch,
            on="",
            wanted=0,
            running=0,
            pending=0,
            usd_per_h=None,
            seconds=time.time() - head.started_at,
            supervised=None,
            problem=str(error),
            head=head.head,
        )
    if row is None:
        if time.time() - head.started_at > KEPT_S:
            forget_head_launch(head)
        return None
    return JobStatus(**{name: row[name] for name in _NAMES if name in row} | {"head": head.head})


async def _describe_launch(launch: FoundLaunch) -> JobStatus:
    record = launch.record
    machines: list[Machine] = []
    problem = "" if launch.is_supervised else f"its supervisor has ended: culm down {record.job}"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            machines = await launch.open_provider().machines()
    except (CulmError, TimeoutError) as error:
        problem = f"the machines cannot be listed: {error or 'no answer'}"
    living = [machine for machine in machines if machine.state != "ended"]
    prices = [machine.price_per_h for machine in living]
    return JobStatus(
        job=record.job,
        launch=record.order.launch,
        on=record.order.provider,
        wanted=record.machines,
        running=sum(machine.state == "running" for machine in living),
        pending=sum(machine.state == "pending" for machine in living),
        usd_per_h=None if None in prices else sum(price or 0.0 for price in prices),
        seconds=time.time() - record.started_at,
        supervised=launch.is_supervised,
        problem=problem,
    )


_NAMES = tuple(each.name for each in dataclasses.fields(JobStatus))
