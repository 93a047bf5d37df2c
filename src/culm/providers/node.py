"""A node as local processes: the agent, and the worker that it forks before it starts any thread."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from multiprocessing import Pipe
from typing import TYPE_CHECKING

from culm.cluster.agent import Agent, StartWorker
from culm.cluster.notice import AnyNotice, SignalNotice, notice_source
from culm.providers.base import REJOIN, ended
from culm.providers.cradle import Born, Cradle, die_with
from culm.providers.nursery import NVML_CHECK, Start, fork, readable
from culm.providers.stores import joined
from culm.providers.strike import Board, Striker
from culm.runtime.clock import RealClock
from culm.runtime.fingerprint import fingerprint
from culm.runtime.worker import Worker
from culm.transport.links import HANDSHAKE_S
from culm.transport.sockets import SocketTransport

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from culm.job import Job

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 << 20
"""Bytes: the most that glibc takes for the second of them."""


def run_node(job: Job, order: Start, board: Board) -> None:
    """The agent's process, from its first moment to its last. SIGTERM is blocked until somebody waits for a notice; in
    the worker it stays so, which goes on until its agent ends it."""
    clock = RealClock(Striker(order.kills, board))

    def born(address: str) -> None:
        _run_worker(job, order, address, clock)

    if order.renews:
        ended = asyncio.run(_agent(job, order, Cradle(born).run, clock))
    else:
        ended = _with_one_worker(job, order, born, clock)
    if not ended:
        sys.exit(REJOIN)


def _with_one_worker(job: Job, order: Start, born: Born, clock: RealClock) -> bool:
    """The usual node: its worker is forked now, and the node ends with it."""
    ours, theirs = Pipe()
    agent = os.getpid()

    def child() -> None:
        ours.close()
        die_with(agent)
        _when_told(theirs, born)

    worker = fork(child)
    theirs.close()

    async def start_worker(address: str) -> str | None:
        ours.send_bytes(address.encode())
        await _ended(worker)
        return _how_ended(worker)

    try:
        return asyncio.run(_agent(job, order, start_worker, clock))
    finally:
        _kill(worker)


def _when_told(pipe: Connection, born: Born) -> None:
    """The worker's life, from when its agent says where it is; an agent may be killed before that."""
    try:
        address = pipe.recv_bytes().decode()
    except (EOFError, OSError):
        return
    born(address)


async def _agent(job: Job, order: Start, start_worker: StartWorker, clock: RealClock) -> bool:
    """Whether the run has ended."""
    transport = _transport(order)
    try:
        async with joined(order.place, transport, clock) as (store, prober):
            seams = (transport, clock, store)
            notices = AnyNotice(SignalNotice(order.grace_s), notice_source(order.notice, clock))
            rest = (start_worker, notices)
            agent = Agent(job, order.node, fingerprint(job), *seams, *rest, prober=prober, zone=order.zone)
            return await agent.run()
    finally:
        await transport.close()


def _run_worker(job: Job, order: Start, address: str, clock: RealClock) -> None:
    import torch

    # Only the nursery must look for GPUs that way: it takes milliseconds, and optimizers look at every step.
    os.environ.pop(NVML_CHECK, None)
    if job.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nor need autograd ask a GPU's driver at every call
    torch.set_num_threads(job.threads)
    _keep_memory()

    async def main() -> None:
        transport = _transport(order, look_out=_look_out(order.neighbours))
        try:
            await Worker(job, order.node, address, transport, clock).run()
        finally:
            await transport.close()

    # What was imported before the fork lives for ever: collecting it again and again would only copy its pages.
    gc.freeze()
    asyncio.run(main())


def _transport(order: Start, *, look_out: float = 0.0) -> SocketTransport:
    ports = range(order.ports[0], order.ports[1] + 1) if order.ports else None
    patience = max(HANDSHAKE_S, 2 * order.place.suspect_after)
    return SocketTransport(secret=order.secret, host=order.host, ports=ports, look_out=look_out, unheard=patience)


def _look_out(neighbours: int) -> float:
    """Seconds that a worker watches for a frame before it sleeps: only where every worker has a core to itself and one
    is left for the rest, since waking up takes longer than most frames do."""
    return 0.020 if len(os.sched_getaffinity(0)) > neighbours else 0.0


def _keep_memory() -> None:
    """What a micro-batch frees the next one asks for: the allocator had better keep it than give it back to the kernel
    and take it again page by page (5 to 10 % of the time of a layer of width 256). Only glibc has the switches."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, -1)
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)


async def _ended(pid: int) -> None:
    """Wait for a child without blocking."""
    descriptor = os.pidfd_open(pid)
    try:
        await readable(descriptor)
    finally:
        os.close(descriptor)


def _how_ended(pid: int) -> str | None:
    """Of a child that has ended, and may still be waited for. Nothing where somebody killed it, as a loss would."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None or (found.si_code != os.CLD_EXITED and found.si_status == signal.SIGKILL):
        return None
    return ended(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
