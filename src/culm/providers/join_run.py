"""RunParticipant: provides nodes of this machine to a run that was started elsewhere (`culm agent`, `culm.join`)."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.run_setup import JobReference, RunSetup, decode_job_reference, decode_result, decode_setup
from culm.cluster.store.node_numbers import allocate_node_numbers
from culm.errors import RunError
from culm.machines.job_archive import archive_cache, unpack_job
from culm.observe.slot_assignments import slot_assignments
from culm.providers.fork_server import CheckJob, JobMatches, JobSource, LoadFailed, StartNode, to_exception
from culm.providers.gpu_workers import announce_gpus, check_gpus
from culm.providers.local_provider import LocalProvider
from culm.providers.provider import EXIT_REJOIN
from culm.providers.run_store import StoreLocation, open_etcd_store
from culm.providers.shared_folder import check_shared_folder
from culm.runtime import messages
from culm.runtime.clock import RealClock
from culm.runtime.epoch import Epoch

if TYPE_CHECKING:
    from collections.abc import Callable

    from culm.cluster.store.store import Store
    from culm.providers.local_provider import ForkServerClient

_MAX_REJOINS_OF_MACHINE = 20
"""How often a machine rejoins: a worker that fails this often will fail again."""
_RESULT_TIMEOUT_S = 5.0
_REMIND_S = 30.0
_SETUP_RECHECK_S = 2.0
"""Time between two looks whether a run without a setup still exists."""


class RunParticipant:
    """Provides one node at a time, from the start of the run until it has a result."""

    def __init__(
        self,
        fork_server: ForkServerClient,
        store_location: StoreLocation,
        start_command: StartNode,
        print_line: Callable[[str], None],
        *,
        uses_archive: bool = False,
        machine: str = "",
        idle_timeout_s: float = 0.0,
    ) -> None:
        """`start_command` is the template for the nodes. `print_line` is called with sentences for the user.
        `uses_archive`: whether the job's files come from the store; else they must be on this machine. `machine`: id
        of this machine at its provider, which the launcher finds under the key `machine/NODE`. `idle_timeout_s`: leave
        the run when the node has had no slot for so long; 0: wait on."""
        self._fork_server, self._store_location, self._start_command, self._print = (
            fork_server,
            store_location,
            start_command,
            print_line,
        )
        self._provider = LocalProvider(fork_server, start_command)
        self._uses_archive = uses_archive
        self._machine, self._idle_timeout_s = machine, idle_timeout_s
        self._gpus = 0
        """How many workers can have a GPU of this machine of their own."""
        self._node: int | None = None
        self._leaving = False
        self._wanted = 0
        """How many nodes the run should have."""
        self._end = ""
        """Why the run has ended, as the end of a sentence."""
        self._has_ended = asyncio.Event()

    async def run(self, path: tuple[str, ...]) -> None:
        """Join the run, and rejoin as a new node after every loss. `path`: sys.path for the import of the job.

        Raises UsageError if etcd cannot be used, the secret is wrong, or the job differs on this machine; the run is
        not affected. Raises RunError if the node fails in a way that would repeat.
        """
        await self._check_job(path)
        for _ in range(_MAX_REJOINS_OF_MACHINE):
            if not await self._start_node():
                return
            watching = asyncio.create_task(self._report(self._node or 0))
            try:
                status = (await self._provider.wait_for_exit()).status
                if status == 0 and not self._leaving:
                    await self._wait_for_end()
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            if status == 0 or self._leaving:
                self._print(f"node {self._node} has left job {self._store_location.job}{self._end}")
                return
            if status != EXIT_REJOIN and status > 0:  # below zero: killed by a signal, and the machine can rejoin
                raise RunError(f"node {self._node} ended with status {status}: see its output above")
            self._print(f"the run went on without node {self._node}: this machine rejoins as a new node")
        raise RunError(f"this machine was lost {_MAX_REJOINS_OF_MACHINE} times: see the output of its worker")

    async def _wait_for_end(self) -> None:
        """Wait a moment for the reason of the end, which the node may have seen before this process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_RESULT_TIMEOUT_S):
                await self._has_ended.wait()

    async def _report(self, node: int) -> None:
        """Report what a node waits for, the layers that it holds, and how the run has ended."""
        async with open_etcd_store(self._store_location, RealClock()) as store, asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(self._report_joined(store, node))
            tasks.create_task(self._note_result(store))
            await self._report_layers(store, node, waiting)

    async def _report_joined(self, store: Store, node: int) -> None:
        """Report how many nodes have joined, from the registration of this one until the run begins: at once, when all
        are there, and at most every half minute in between."""
        there: set[str] = set()
        loop, said_at = asyncio.get_running_loop(), -math.inf
        async with aclosing(store.watch("nodes/")) as changes:
            async for key, value in changes:
                (there.discard if value is None else there.add)(key)
                is_due = len(there) >= self._wanted or loop.time() - said_at >= _REMIND_S
                if f"nodes/{node}" in there and is_due:
                    said_at = loop.time()
                    missing = "" if len(there) >= self._wanted else "; the run waits for the others"
                    self._print(f"node {node} has joined: {len(there)} of {self._wanted} nodes are there{missing}")

    async def _note_result(self, store: Store) -> None:
        """Note why the run has ended."""
        async with aclosing(store.watch("result")) as changes:
            async for key, value in changes:
                if key == "result" and value is not None:
                    result = decode_result(value)
                    self._end = f": the run has ended: {result.message}" if result.error else ": the run has ended"
                    self._has_ended.set()
                    return

    async def _report_layers(self, store: Store, node: int, waiting: asyncio.Task[None]) -> None:
        """Report the layers that a node holds whenever they change. `waiting` ends when the run begins."""
        held = ""
        leaving: asyncio.TimerHandle | None = None
        async with aclosing(store.watch("epoch")) as changes:
            async for _, value in changes:
                epoch = None if value is None else messages.decode(value)
                if not isinstance(epoch, Epoch):
                    continue
                waiting.cancel()
                if (now := _describe_slot(epoch, node)) != held:
                    held = now
                    self._print(f"node {node} {held} since epoch {epoch.number}")
                if epoch.slots_of_node(node) and leaving is not None:
                    leaving.cancel()
                    leaving = None
                elif not epoch.slots_of_node(node) and leaving is None and self._idle_timeout_s:
                    leaving = asyncio.get_running_loop().call_later(self._idle_timeout_s, self._leave_idle, node)

    def _leave_idle(self, node: int) -> None:
        if node == self._node:
            self._print(f"node {node} has had no slot for {self._idle_timeout_s:.0f} s: it is released")
            self.leave(0.0)

    def leave(self, notice_s: float) -> bool:
        """Make the node hand over its state and leave within `notice_s` seconds. False: there is no node yet."""
        self._leaving = True
        if self._node is not None:
            self._provider.stop(self._node, notice_s)
        return self._node is not None

    async def _check_job(self, path: tuple[str, ...]) -> None:
        """Wait for the job, import it, and compare it with that of the run."""
        async with open_etcd_store(self._store_location, RealClock()) as store:
            job = await self._wait_for_job(store)
            reference, path = await self._find_files(store, job, path)
        self._fork_server.send_command(CheckJob(JobSource(reference, job.overrides, path=path), job.identity))
        while True:
            match await self._fork_server.next_reply():
                case JobMatches(gpus):
                    break
                case LoadFailed() as report:
                    raise to_exception(report)
        self._gpus = gpus
        async with open_etcd_store(self._store_location, RealClock()) as store:
            await announce_gpus(store, gpus)

    async def _find_files(self, store: Store, job: JobReference, path: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """(FILE[:function] on this machine, sys.path to import it with): from the archive in the store, or as given."""
        if not self._uses_archive or not job.archive:
            return job.reference, path
        data = await store.get("archive")
        if data is None:
            raise RunError(f"the archive of job {self._store_location.job} is missing in the store: the run has ended")
        folder = unpack_job(data, job.archive, archive_cache())
        self._print(f"the files of job {self._store_location.job} are in {folder}")
        return str(folder / job.archived_reference), (str(folder), *path)

    async def _wait_for_job(self, store: Store) -> JobReference:
        found = await store.get("job")
        if found is None:
            self._print(f"waiting for culm run --job {self._store_location.job}")
            async with aclosing(store.watch("job")) as changes:
                async for key, value in changes:
                    if key == "job" and value is not None:
                        found = value
                        break
        return decode_job_reference(found or b"")

    async def _start_node(self) -> bool:
        """Start a node with a new number. Returns False if the run has ended."""
        async with open_etcd_store(self._store_location, RealClock()) as store:
            decoded = await self._wait_for_setup(store)
            if decoded is None or await store.get("result") is not None:
                self._print(f"job {self._store_location.job} has ended")
                return False
            self._wanted = decoded.nodes
            if sentence := check_gpus(self._gpus, decoded.workers_per_node):
                self._print(sentence)
            await check_shared_folder(store, decoded.out, RealClock())
            self._adopt_setup(decoded)
            (self._node,) = await allocate_node_numbers(store)
            if self._machine:
                await store.put(f"machine/{self._node}", self._machine.encode())
        self._provider.start(self._node, self._start_command.zone)
        self._print(f"joining job {self._store_location.job} as node {self._node}")
        return True

    async def _wait_for_setup(self, store: Store) -> RunSetup | None:
        """The setup of the run, which may depend on the GPUs that machines announce; None: the run has ended."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SETUP_RECHECK_S), aclosing(store.watch("setup")) as changes:
                    async for key, value in changes:
                        if key == "setup" and value is not None:
                            return decode_setup(value)
            if await store.get("job") is None:
                return None

    def _adopt_setup(self, setup: RunSetup) -> None:
        """Use the timeouts, the number of workers and the hooks of the run for nodes of this machine."""
        place = msgspec.structs.replace(
            self._store_location, suspect_after=setup.suspect_after, blocked_after=setup.blocked_after
        )
        K = setup.workers_per_node
        command = msgspec.structs.replace(
            self._start_command,
            store=place,
            workers_on_host=K,
            workers_per_node=K,
            runs_hooks=setup.runs_hooks,
            encrypt=setup.encrypt,
        )
        self._provider = LocalProvider(self._fork_server, command)


def _describe_slot(epoch: Epoch, node: int) -> str:
    """What a node does in an epoch, as the end of a sentence."""
    assigned = [each for each in slot_assignments(epoch) if each.node == node]
    if not assigned:
        return "waits for a slot"
    ranges = " and ".join(each.layers for each in assigned if each.layers)
    slots = " and ".join(each.slot for each in assigned)
    layers = f"runs layers {ranges}" if ranges else "keeps shadow replicas"
    return f"{layers} (slot {slots})"
