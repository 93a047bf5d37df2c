"""The processes of a node: the agent, and the workers that it forks before it starts any thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing import Pipe
from typing import TYPE_CHECKING

from culm.cluster.agent.agent import Agent, StartWorker
from culm.cluster.agent.liveness_probe import refuses_connection
from culm.cluster.agent.preemption_notice import FirstNoticeSource, SignalNoticeSource, make_notice_source
from culm.device.nccl_settings import configure_nccl
from culm.errors import DeviceFailed, RunError
from culm.providers.allocator import keep_freed_memory, return_freed_memory
from culm.providers.fork_server import NVML_CHECK_VARIABLE, StartNode, fork, wait_readable
from culm.providers.hook_process import HookProcess
from culm.providers.kill_injection import KillInjector, ProcessTable
from culm.providers.process_title import set_process_title
from culm.providers.provider import EXIT_REJOIN, describe_exit
from culm.providers.run_store import open_node_store
from culm.providers.worker_fork_server import WorkerForkServer, WorkerMain, set_parent_death_signal
from culm.runtime.clock import RealClock
from culm.runtime.compute.device import fingerprint
from culm.runtime.worker import Worker
from culm.transport.frames.connections import HANDSHAKE_S
from culm.transport.frames.encryption_policy import is_loopback
from culm.transport.frames.sockets import SocketTransport

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from culm.cluster.store.store import Store
    from culm.job import Job

_FLIGHT_RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
"""Number of sums whose call stacks torch keeps to debug a hang, 2,000 by default."""


def run_node(job: Job, command: StartNode, process_table: ProcessTable) -> None:
    """Run the agent process of a node to its end. SIGTERM is blocked until the agent waits for it as a notice. It stays
    blocked in the workers, which run until their agent ends them."""
    # Objects imported before the fork are never freed: collecting them, here and in the workers, would only copy their
    # pages.
    gc.freeze()
    return_freed_memory()
    clock = RealClock(KillInjector(command.kills, process_table))
    hooks = HookProcess(job) if command.runs_hooks else None
    set_process_title("agent", command.title or command.store.job, command.node)

    def worker_main(index: int, address: str) -> None:
        _run_worker(job, command, index, address, clock)

    mains = [partial(worker_main, index) for index in range(command.workers_per_node)]
    run_workers = _run_with_restarted_workers if command.restarts_workers else _run_with_forked_workers
    try:
        ended = run_workers(job, command, mains, clock, hooks)
    finally:
        if hooks is not None:
            hooks.end()
    if not ended:
        sys.exit(EXIT_REJOIN)


def _run_with_restarted_workers(
    job: Job, order: StartNode, mains: Sequence[WorkerMain], clock: RealClock, hooks: HookProcess | None
) -> bool:
    """Run a node whose workers may be replaced. Returns whether the run has ended."""
    servers = [WorkerForkServer(worker_main) for worker_main in mains]

    async def start_worker(address: str, index: int) -> str | None:
        return await servers[index].run_worker(address)

    return asyncio.run(_run_agent(job, order, start_worker, clock, hooks))


def _run_with_forked_workers(
    job: Job, order: StartNode, mains: Sequence[WorkerMain], clock: RealClock, hooks: HookProcess | None
) -> bool:
    """Run a node whose workers are forked now and never replaced. Returns whether the run has ended."""
    workers = [_fork_worker(worker_main) for worker_main in mains]

    async def start_worker(address: str, index: int) -> str | None:
        process, pipe = workers[index]
        pipe.send_bytes(address.encode())
        await _wait_for_exit(process)
        return _describe_child_exit(process)

    try:
        return asyncio.run(_run_agent(job, order, start_worker, clock, hooks))
    finally:
        for process, _ in workers:
            _kill_and_reap(process)


def _fork_worker(worker_main: WorkerMain) -> tuple[int, Connection]:
    """Fork a worker that waits for the address of its agent. Returns its process id and the pipe for the address."""
    parent_end, child_end = Pipe()
    agent = os.getpid()

    def child() -> None:
        parent_end.close()
        set_parent_death_signal(agent)
        _wait_for_address(child_end, worker_main)

    process = fork(child)
    child_end.close()
    return process, parent_end


def _wait_for_address(pipe: Connection, worker_main: WorkerMain) -> None:
    """Run the worker as soon as the agent has sent its address. Returns if the agent was killed before that."""
    try:
        address = pipe.recv_bytes().decode()
    except (EOFError, OSError):
        return
    worker_main(address)


async def _run_agent(
    job: Job, order: StartNode, start_worker: StartWorker, clock: RealClock, hooks: HookProcess | None
) -> bool:
    """Run the agent. Returns whether the run has ended."""
    machine = fingerprint(job)  # before a lease has to be renewed: asking a GPU may take seconds
    transport = _transport(order)
    try:
        async with open_node_store(order.store, transport, clock) as client:
            store, prober = await client.open()
            seams = (transport, clock, store)
            advising: list[asyncio.Future[None]] = []

            def advise(reason: str) -> None:
                _print_warning(
                    order.node, f"{reason}; it is used until its replacement has joined, or EC2 gives notice"
                )
                advising.append(asyncio.ensure_future(_pass_on_advice(store, order.node, reason)))

            cloud_notices = make_notice_source(order.notice, clock, partial(_print_warning, order.node), advise)
            notices = FirstNoticeSource(SignalNoticeSource(order.grace_s), cloud_notices)
            rest = (start_worker, notices)
            agent = Agent(
                job,
                order.node,
                machine,
                *seams,
                *rest,
                prober=prober,
                reopen_store=client.open if client.can_reopen else None,
                refuses_connection=refuses_connection if client.can_reopen else None,
                on_note=lambda sentence: print(f"culm: {sentence}", file=sys.stderr, flush=True),
                hooks=hooks,
                zone=order.zone,
                rental=order.rental,
                workers_per_node=order.workers_per_node,
            )
            return await agent.run()
    finally:
        await transport.close()


async def _pass_on_advice(store: Store, node: int, reason: str) -> None:
    """Report that this machine should be replaced, for the process that requests machines. If the store does not
    answer, nothing is reported."""
    with contextlib.suppress(RunError):
        await store.put(f"advice/{node}", reason.encode())


def _print_warning(node: int, sentence: str) -> None:
    print(f"culm: node {node}: {sentence}", file=sys.stderr, flush=True)


def _run_worker(job: Job, order: StartNode, index: int, address: str, clock: RealClock) -> None:
    import torch

    set_process_title("worker", order.title or order.store.job, order.node)
    # Only the fork server needs the NVML check: it takes milliseconds, and optimizers ask for GPUs in every step.
    os.environ.pop(NVML_CHECK_VARIABLE, None)
    # Hangs are found by heartbeats. What is kept of each sum would be scattered over the heap, which then grows.
    os.environ.setdefault(_FLIGHT_RECORDER_VARIABLE, "0")
    if job.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # autograd then does not query the GPU driver
    torch.set_num_threads(job.threads)
    keep_freed_memory()
    if job.device != "cpu":
        configure_nccl(
            order.node * order.workers_per_node + index,
            shares_gpu=order.workers_on_host > order.workers_per_node or ":" in job.device,
            within_machine=is_loopback(order.host),
        )

    async def main() -> None:
        transport = _transport(order, look_out=_busy_wait_s(order.workers_on_host))
        try:
            K = order.workers_per_node
            worker = Worker(
                job,
                order.node * K + index,
                address,
                transport,
                clock,
                workers_per_node=K,
                workers_on_host=order.workers_on_host,
                free_memory=gc.collect,
            )
            await worker.run()
        finally:
            await transport.close()

    try:
        asyncio.run(main())
    except DeviceFailed as error:
        raise SystemExit(f"node {order.node}: {error}") from None


def _transport(order: StartNode, *, look_out: float = 0.0) -> SocketTransport:
    ports = range(order.ports[0], order.ports[1] + 1) if order.ports else None
    patience = max(HANDSHAKE_S, 2 * order.store.suspect_after)
    return SocketTransport(
        secret=order.secret,
        host=order.host,
        ports=ports,
        spin_s=look_out,
        unacknowledged_s=patience,
        encryption=order.encrypt,
    )


def _busy_wait_s(workers_on_host: int) -> float:
    """Seconds that a worker polls for a frame before it sleeps, because waking up takes longer than most frames. Zero
    unless every worker has a core for itself and one is left for the rest."""
    return 0.020 if len(os.sched_getaffinity(0)) > workers_on_host else 0.0


async def _wait_for_exit(pid: int) -> None:
    """Wait for the end of a child without blocking the event loop."""
    descriptor = os.pidfd_open(pid)
    try:
        await wait_readable(descriptor)
    finally:
        os.close(descriptor)


def _describe_child_exit(pid: int) -> str | None:
    """How a child ended, without reaping it; None if it was killed by SIGKILL, as in a preemption."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None or (found.si_code != os.CLD_EXITED and found.si_status == signal.SIGKILL):
        return None
    return describe_exit(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def _kill_and_reap(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
