"""Nodes on this machine: the fork server client, the provider that starts nodes with it, and `local_run`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import resource
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from culm.cluster.run_setup import JobReference, RunSetup, StepGate, encode
from culm.cluster.store.encrypted_store import connection_secret
from culm.errors import CulmError, PlanError, RunError, UsageError
from culm.machines.job_archive import JobArchive, pack_job
from culm.market.rental_cost import rental_terms
from culm.providers import fork_server as side
from culm.providers.fork_server import (
    GRACE_S,
    AgentExited,
    JobLoaded,
    JobSource,
    LoadFailed,
    LoadJob,
    LoadProgress,
    StartNode,
    StopNode,
    to_exception,
)
from culm.providers.fork_server_process import ForkServerProcess
from culm.providers.gpu_workers import first_announced_gpus, workers_for_gpus
from culm.providers.kill_injection import ProcessTable
from culm.providers.private_etcd import PrivateEtcd
from culm.providers.provider import NodeExit, describe_exit
from culm.providers.run_handle import RunHandle
from culm.providers.run_store import StoreLocation, open_job_in_etcd, open_launcher_store
from culm.providers.shared_folder import check_shared_folder
from culm.providers.supervisor.run_registry import registry_name
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from culm.cluster.store.etcd import EtcdAccess
    from culm.cluster.store.store import Store
    from culm.config import RunConfig
    from culm.providers.shared_run import SharedRun

__all__ = ["ForkServerClient", "LocalProvider", "RunHandle", "local_run"]

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is in all."""
OpenedStore: TypeAlias = "tuple[Store, StoreLocation, bytes]"
"""A store, how nodes reach it, and the secret with which they authenticate to each other."""
_SHUTDOWN_WAIT_S = 10.0
_EXIT_WAIT_S = 1.0
_BASE_OPEN_FILES = 16
"""Files that a leader has open, apart from its connections to the agent and the workers of each node."""
run_numbers = itertools.count()
"""A fork server may serve several runs, one after the other: the exit of a node names its run."""


class ForkServerClient:
    """The supervisor's side of a fork server. Start it early: it imports torch while this process does other work.

    The fork server and the nodes print to the descriptors `stdout` and `stderr`; default: those of this process.
    """

    def __init__(
        self, started: ForkServerProcess | None = None, *, stdout: int | None = None, stderr: int | None = None
    ) -> None:
        """`started`: a fork server that was started already."""
        started = started or ForkServerProcess(stdout=stdout, stderr=stderr)
        self._pipe, self._process = started.pipe, started.process
        self.process_table = ProcessTable(started.table_descriptor)
        """Process ids of the nodes, in memory shared with them."""
        self.private_etcd: PrivateEtcd | None = None
        """The etcd of its runs; None until the first run."""

    async def start_private_etcd(self, on_note: Callable[[str], None] = lambda _: None) -> EtcdAccess | None:
        """Start the private etcd of all runs of this fork server; it ends with the fork server. Returns None if etcd is
        not installed: then this process holds the store, and `on_note` is called with a sentence about it."""
        if self.private_etcd is not None and self.private_etcd.running:
            return self.private_etcd.access
        try:
            self.private_etcd = await PrivateEtcd().__aenter__()
        except CulmError as error:
            on_note(f"the store is kept in this process: {error}")
            return None
        return self.private_etcd.access

    async def keep_etcd_running(self, on_note: Callable[[str], None] = lambda _: None) -> None:
        """Restart the private etcd whenever it ends. Returns at once if there is none. Raises RunError if it does not
        start again."""
        if self.private_etcd is not None:
            await self.private_etcd.keep_running(on_note)

    @property
    def pid(self) -> int:
        """Process id; also the process group of all processes that it starts."""
        return self._process.pid

    @property
    def pipe(self) -> Connection:
        return self._pipe

    def send_command(self, command: side.ForkServerCommand) -> None:
        try:
            self._pipe.send_bytes(side.encode_command(command))
        except OSError:
            raise self._exit_error() from None

    async def next_reply(self) -> side.ForkServerReply:
        """The next reply, without blocking the event loop. Raises RunError if the fork server has ended."""
        await side.wait_readable(self._pipe.fileno())
        try:
            report: side.ForkServerReply = side.reply_decoder.decode(self._pipe.recv_bytes())
            return report
        except (EOFError, OSError):
            raise self._exit_error() from None

    def _exit_error(self) -> RunError:
        """The error for a closed pipe: the fork server has ended or is about to end."""
        try:
            status = self._process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            return RunError("the fork server of local nodes closed its pipe but does not exit: is there enough memory?")
        likely = "is there enough memory?" if status == -signal.SIGKILL else "a job must not end its process"
        return RunError(f"the fork server of local nodes has {describe_exit(status)}: {likely}")

    def close(self) -> None:
        """End the fork server and every process forked from it, even if it is busy."""
        self._pipe.close()
        self.kill()
        self._process.wait()
        self.process_table.close()
        if self.private_etcd is not None:
            self.private_etcd.close()

    def kill(self) -> None:
        """Kill the whole process group at once. The group may outlive a fork server that was killed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self) -> ForkServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalProvider:
    """Provider of nodes on this machine: an agent with its workers, forked from the fork server in milliseconds."""

    def __init__(self, fork_server: ForkServerClient, start_command: StartNode) -> None:
        """`start_command` is the template for all nodes; number and zone are filled in for each."""
        self._fork_server, self._start_command = fork_server, start_command

    def start(self, node: int, zone: str = "") -> None:
        template = self._start_command
        rental = None if template.rental is None else msgspec.structs.replace(template.rental, zone=zone)
        self._fork_server.send_command(msgspec.structs.replace(template, node=node, zone=zone, rental=rental))

    def stop(self, node: int, notice_s: float = 0.0) -> None:
        self._fork_server.send_command(StopNode(node, self._start_command.run, notice_s))

    async def wait_for_exit(self) -> NodeExit:
        while True:
            report = await self._fork_server.next_reply()
            if isinstance(report, AgentExited) and report.run == self._start_command.run:
                return NodeExit(report.node, report.status)


@asynccontextmanager
async def local_run(
    fork_server: ForkServerClient,
    source: JobSource,
    config: RunConfig,
    *,
    on_progress: OnProgress = lambda *_: None,
    on_prepared: Callable[[RunSetup], None] = lambda _: None,
    on_changed: Callable[[RunSetup], None] = lambda _: None,
    shared: SharedRun | None = None,
    zones: Callable[[int], Sequence[str]] = lambda _: (),
    grace_s: float = GRACE_S,
    gate: StepGate | None = None,
) -> AsyncIterator[RunHandle]:
    """Load the job, start its nodes and yield the run; afterwards no node of this machine is left.

    `on_prepared` is called when everything is decided and nothing started; what it raises ends the run there.
    `on_changed` is called with the final setup if the GPUs of the first machine that joins change it. `zones`:
    the zones of the first nodes, for a number of nodes. `grace_s`: seconds that a node has after SIGTERM. `gate`: see
    `prepare_run`. Raises UsageError if the config, the job or the etcd is wrong; then nothing was started.
    """
    number = next(run_numbers)
    kept = (
        _open_private_store(fork_server, f"run-{number}", config, on_progress)
        if shared is None
        else _open_shared_store(shared, config, on_progress)
    )
    async with kept as opened:
        fork_server.send_command(LoadJob(source, config, identify=shared is not None, gate=gate))
        loaded = await _wait_until_loaded(fork_server, on_progress)
        on_prepared(loaded.setup)
        store, place, secret = await opened
        if shared is not None:
            await _offer_job(store, source, loaded, is_archive_required=config.join is not None)
        workers = 1 if shared is None else await _workers_of_node(store, config, loaded, shared, on_progress)
        if workers > 1:
            config = dataclasses.replace(config, workers_per_node=workers)
            fork_server.send_command(LoadJob(source, config, gate=gate))
            try:
                loaded = await _wait_until_loaded(fork_server, on_progress)
            except (PlanError, UsageError) as error:
                why = f"nodes have {workers} workers, one for each GPU: --workers-per-node changes that"
                raise type(error)(f"{error} ({why})") from error
            on_changed(loaded.setup)
        setup = loaded.setup
        count, K = setup.nodes if shared is None else shared.local_nodes, setup.workers_per_node
        raise_open_file_limit(count, K)
        command = StartNode(
            0,
            place,
            secret,
            ports=config.ports,
            workers_on_host=setup.workers,
            workers_per_node=K,
            run=number,
            title=registry_name(config.job_name, source.reference),
            kills=setup.kills,
            restarts_workers=setup.restarts_workers,
            runs_hooks=setup.runs_hooks,
            grace_s=grace_s,
            rental=rental_terms(instance=config.instance, market=config.market, usd_h=config.node_price),
            encrypt=config.encrypt,
        )
        if shared is None:
            run = RunHandle(setup, store, LocalProvider(fork_server, command))
        else:
            command = msgspec.structs.replace(command, host=shared.host, workers_on_host=max(1, count * K))
            run = RunHandle(setup, store, LocalProvider(fork_server, command), owns_all_nodes=False)
        if count and shared is not None:
            await check_shared_folder(store, setup.out, RealClock())
        await store.put("setup", encode(setup))
        async with (
            _etcd_kept_running(fork_server, run) if shared is None else nullcontext(),
            run_nodes(run, count, zones(count)),
        ):
            yield run


async def _offer_job(store: Store, source: JobSource, loaded: JobLoaded, *, is_archive_required: bool) -> None:
    """Write what other machines need to import the job and to compare theirs."""
    job_reference = JobReference(source.reference, source.overrides, loaded.identity)
    if packed := _pack_for_machines(source.reference, is_required=is_archive_required):
        await store.put("archive", packed.data)
        job_reference = msgspec.structs.replace(
            job_reference, archive=packed.digest, archived_reference=packed.reference
        )
    await store.put("job", encode(job_reference))


async def _workers_of_node(
    store: Store, config: RunConfig, loaded: JobLoaded, shared: SharedRun, on_progress: OnProgress
) -> int:
    """How many workers a node has if the config leaves it to the GPUs of the machines; else 1, which changes nothing.
    Nodes of this machine divide its GPUs; without any, the first machine that joins decides."""
    if config.workers_per_node is not None or not loaded.may_use_gpus:
        return 1
    if shared.local_nodes:
        return workers_for_gpus(config, loaded.gpus // shared.local_nodes)

    def say(sentence: str) -> None:
        on_progress(sentence, 0, 0)

    gpus = await first_announced_gpus(store, config.start_timeout, say)
    workers = workers_for_gpus(config, gpus)
    if workers > 1:
        say(f"the first machine has {gpus} GPUs: each node has {workers} workers (--workers-per-node changes that)")
    return workers


def _pack_for_machines(reference: str, *, is_required: bool) -> JobArchive | None:
    """The archive of a job's files. None if they are too large and machines with `--etcd` need none: they have the
    files. Raises UsageError if it is required."""
    try:
        return pack_job(reference)
    except UsageError:
        if is_required:
            raise
        return None


@asynccontextmanager
async def _etcd_kept_running(fork_server: ForkServerClient, run: RunHandle) -> AsyncIterator[None]:
    """Restart the private etcd of a run whenever it ends. If it does not start again, the run fails."""

    async def keep() -> None:
        try:
            await fork_server.keep_etcd_running(run.add_note)
        except RunError as error:
            run.abort(str(error))

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def raise_open_file_limit(nodes: int, workers_per_node: int = 1) -> None:
    """Raise the limit of open files to what this many nodes need. Raises UsageError if the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _BASE_OPEN_FILES + (1 + workers_per_node) * nodes
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"a process may have {hard} files open (ulimit -n), and {nodes} nodes need {needed}: allow more"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@asynccontextmanager
async def _open_private_store(
    fork_server: ForkServerClient, job: str, config: RunConfig, on_progress: OnProgress
) -> AsyncIterator[Awaitable[OpenedStore]]:
    """The store of a run on this machine alone. It is opened while the fork server imports torch."""
    secret = os.urandom(32)

    async def opened() -> OpenedStore:
        access = await fork_server.start_private_etcd(lambda sentence: on_progress(sentence, 0, 0))
        kept = (
            open_launcher_store(secret, config.encrypt)
            if access is None
            else open_job_in_etcd(access, job, config.suspect_after, blocked_after=config.blocked_after)
        )
        return *await stack.enter_async_context(kept), secret

    async with AsyncExitStack() as stack:
        opening = asyncio.create_task(opened())
        try:
            yield opening
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)


@asynccontextmanager
async def _open_shared_store(
    shared: SharedRun, config: RunConfig, on_progress: OnProgress
) -> AsyncIterator[Awaitable[OpenedStore]]:
    """The store of a run on several machines. It is opened first, so that its errors show before the job is loaded."""
    kept = open_job_in_etcd(
        shared.access,
        shared.job,
        config.suspect_after,
        shared.secret,
        blocked_after=config.blocked_after,
        on_note=lambda sentence: on_progress(sentence, 0, 0),
    )
    async with kept as (store, place):

        async def opened() -> OpenedStore:
            return store, place, connection_secret(shared.secret, shared.job)

        yield asyncio.create_task(opened())


@asynccontextmanager
async def run_nodes(run: RunHandle, nodes: int, zones: Sequence[str] = ()) -> AsyncIterator[None]:
    """Start nodes and follow the run and its nodes; afterwards the run and the nodes of this machine have ended."""
    tasks = [asyncio.create_task(run.follow())]
    try:
        await run.nodes.start(nodes, zones)
        tasks.append(watching := asyncio.create_task(run.nodes.watch()))
        yield
        run.fail("the launcher ended the run")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_WAIT_S):
                await asyncio.shield(watching)
    finally:
        if not run.owns_all_nodes:
            await _wait_for_remote_nodes(run)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_remote_nodes(run: RunHandle) -> None:
    """Wait until nodes of other machines have seen that the run ended; then its keys can be deleted."""
    run.fail("the launcher ended the run")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SHUTDOWN_WAIT_S):
            await run.wait_until_nodes_left()


async def _wait_until_loaded(fork_server: ForkServerClient, on_progress: OnProgress) -> JobLoaded:
    while True:
        match await fork_server.next_reply():
            case JobLoaded() as loaded:
                return loaded
            case LoadFailed() as report:
                raise to_exception(report)
            case LoadProgress(text, done, total):
                on_progress(text, done, total)
