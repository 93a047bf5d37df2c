"""Agent: a coroutine on each node that joins the run, starts the workers, forwards epochs and can become the leader."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from culm.cluster.agent.preemption_notice import NoNoticeSource
from culm.cluster.agent.report_collector import ReportCollector
from culm.cluster.leader.epoch_parts import forwarding_shares
from culm.cluster.leader.events import NodeEvicted
from culm.cluster.leader.hang_detector import HangDetector
from culm.cluster.leader.leader import Leader
from culm.cluster.leader.output.hook_runner import InlineHookRunner
from culm.cluster.run_setup import NodeRecord, RunResult, RunSetup, decode_setup, encode
from culm.cluster.store.store import RemoteStore, SessionLost, Store
from culm.errors import NodeLost, RunError, UsageError
from culm.runtime import messages
from culm.runtime.epoch import Epoch

if TYPE_CHECKING:
    from culm.cluster.agent.liveness_probe import LivenessProber, RefusesConnection
    from culm.cluster.agent.preemption_notice import NoticeSource
    from culm.cluster.leader.output.hook_runner import HookRunner
    from culm.job import Job
    from culm.market.rental_cost import RentalTerms
    from culm.runtime.clock import Clock
    from culm.transport.interface import Address, Transport

StartWorker = Callable[["Address", int], "Awaitable[str | None]"]
"""Starts a worker of this node, given the agent's address and the number of the worker on the node. The awaitable
completes when the worker ends; its result is a description of that end if users should see it, else None."""
ReopenStore = Callable[[], "Awaitable[tuple[Store, LivenessProber | None]]"]
"""Opens another session in the store. Raises UsageError if the store is out of reach."""
_REOPEN_PAUSE_S = 0.5
"""Time between two attempts to open another session."""
_REPORT_END_TIMEOUT_S = 0.5
"""Limit for reporting how a worker ended: other nodes are waiting to take over its work."""
_PART_TIMEOUT_S = 1.0
"""How long an agent waits for its part of an epoch that has been announced before it reads the whole from the store."""
_END_TIMEOUT_S = 5.0
"""Limit for a worker to end by itself, and for a leader to write the result to the store."""


class Agent:
    """The agent of one node."""

    def __init__(
        self,
        job: Job,
        node: int,
        fingerprint: str,
        transport: Transport,
        clock: Clock,
        store: Store,
        start_worker: StartWorker,
        notice_source: NoticeSource | None = None,
        *,
        prober: LivenessProber | None = None,
        reopen_store: ReopenStore | None = None,
        refuses_connection: RefusesConnection | None = None,
        on_note: Callable[[str], None] = lambda _: None,
        hooks: HookRunner | None = None,
        zone: str = "",
        rental: RentalTerms | None = None,
        workers_per_node: int = 1,
        simulated: bool = False,
    ) -> None:
        """`prober` checks broken connections, for stores that do not notice a lost node at once. `reopen_store` opens
        another session when that of `store` is lost; None: the node then ends. `refuses_connection`: whether a process
        has ended, by its address; None: a node without a session counts as ended. `on_note` is called with sentences
        for the user. `hooks`: where the job's hook and writers run if this node leads; default: in this process.
        `rental`: what the node costs.
        `simulated`: time is virtual."""
        self.zone, self._prober, self._simulated = zone, prober, simulated
        if rental is not None and rental.rented_at is None:
            rental = msgspec.structs.replace(rental, rented_at=clock.now())
        self._rental = rental
        self._hooks = hooks or InlineHookRunner(job)
        self.job, self.node, self.fingerprint = job, node, fingerprint
        self.transport, self.clock, self.store = transport, clock, store
        self._reopen_store, self._refuses_connection, self._on_note = reopen_store, refuses_connection, on_note
        self._rejoin_within_s = 0.0
        """How long this node keeps its state without a session."""
        self._has_new_session = False
        """Whether this node has just replaced a lost session."""
        self._terms = 0
        """How often this node became the leader."""
        self._forwarded_epoch = b""
        self._start_worker = start_worker
        self._notice_source = notice_source or NoNoticeSource()
        self._leaves_in_s: float | None = None
        self._may_leave_event = asyncio.Event()
        """Set when this node has a notice and nothing left to hand over."""
        self._dismissed_event = asyncio.Event()
        """Set when this node is declared lost although it runs."""
        self._incarnation = 0
        """How often the workers were restarted."""
        self._restart_requested = asyncio.Event()
        self._workers_per_node = workers_per_node
        self._started_workers: dict[int, Address] = {}
        """Addresses of the workers that are up, by number."""
        self._worker_addresses: asyncio.Future[tuple[Address, ...]] = asyncio.get_running_loop().create_future()
        """Done when all workers of the node are up."""
        self._parts: dict[int, messages.EpochPart] = {}
        """By own worker: the newest part of a large epoch."""
        self._part_arrived = asyncio.Event()
        self._report_collector = ReportCollector(transport, clock)
        self._run_ended = False
        self._leader: Leader | None = None

    async def run(self) -> bool:
        """Take part in the run until it ends for this node.

        Returns True if the run has a result or, after a notice, needs nothing more from this node. Returns False if a
        worker died or the node was declared lost; its machine may then rejoin as a new node. Nothing of the node is
        left running afterwards. End the node's store session right after: that is how the other nodes learn that it is
        gone.
        """
        reading = asyncio.create_task(self._read_messages())
        workers = asyncio.ensure_future(self._run_workers())
        following = asyncio.create_task(self._participate_until_ended())
        leaving = asyncio.create_task(self._leave_on_notice())
        dismissal = asyncio.create_task(self._dismissed_event.wait())
        try:
            await asyncio.wait([reading, workers, following, leaving, dismissal], return_when=asyncio.FIRST_COMPLETED)
            if _succeeded(following):
                await asyncio.wait([workers], timeout=_END_TIMEOUT_S)  # they are stopping and may have to clean up
            elif workers.done() and self._leader is not None and not self._leader.state.setup.survives_losses:
                self._leader.inbox.put_nowait(self._leader.state.node_lost_error(self.node))
                await asyncio.wait([following], timeout=_END_TIMEOUT_S)
            return _succeeded(following) or _succeeded(leaving)
        finally:
            await _cancel_and_wait(reading, workers, following, leaving, dismissal)
            self._report_collector.close()
            if self._prober is not None:
                await self._prober.close()

    async def _run_workers(self) -> None:
        """Run the workers, and start others whenever the leader requests it. Returns when a worker ends by itself,
        after its end has been reported to the store: a node is lost as a whole. After the end of the run, returns when
        all of them have ended."""
        while True:
            worker_tasks = [
                asyncio.ensure_future(self._start_worker(self.transport.address, index))
                for index in range(self._workers_per_node)
            ]
            restart_wait = asyncio.ensure_future(self._wait_for_restart_request())
            try:
                done, _ = await asyncio.wait([*worker_tasks, restart_wait], return_when=asyncio.FIRST_COMPLETED)
                if self._run_ended:
                    await asyncio.wait(worker_tasks)
                if not restart_wait.done():
                    end_description = next(task for task in worker_tasks if task in done).result()
                    if end_description is not None:
                        await asyncio.wait(
                            [asyncio.ensure_future(self._report_worker_end(end_description))],
                            timeout=_REPORT_END_TIMEOUT_S,
                        )
                    return
                restart_wait.result()
            finally:
                await _cancel_and_wait(*worker_tasks, restart_wait)
            self._incarnation += 1
            self._forwarded_epoch = b""
            self._started_workers.clear()
            self._worker_addresses = asyncio.get_running_loop().create_future()

    async def _report_worker_end(self, description: str) -> None:
        with contextlib.suppress(RunError):
            await self.store.put(f"ended/{self.node}", description.encode())

    async def _wait_for_restart_request(self) -> None:
        """Register restarted workers once they are up, then wait for the next restart request."""
        if self._incarnation:
            await self._write_node_record(await self._worker_addresses)
        await self._restart_requested.wait()
        self._restart_requested.clear()

    async def _participate_until_ended(self) -> None:
        """Take part in the run until it has a result, over another session if one is lost and the run has not gone on
        without this node meanwhile. Raises SessionLost if it has."""
        while True:
            try:
                await self._participate_in_run()
                return
            except SessionLost:
                if not await self._open_new_session():
                    raise

    async def _open_new_session(self) -> bool:
        """Replace a lost session, while the workers keep their state. Returns False if the run goes on without this
        node, or no session can be opened in time."""
        if self._reopen_store is None or not self._rejoin_within_s:
            return False
        until = self.clock.now() + self._rejoin_within_s
        if self._prober is not None:
            await self._prober.close()
        while self.clock.now() < until:
            try:
                self.store, self._prober = await self._reopen_store()
                self._has_new_session = await self._is_member()
                return self._has_new_session
            except (UsageError, SessionLost):  # the store is out of reach, or this session is lost, too
                await self.clock.sleep(_REOPEN_PAUSE_S)
            except RunError as error:  # the store has lost data
                self._on_note(f"node {self.node}: {error}")
                return False
        return False

    async def _is_member(self) -> bool:
        """Whether the epoch in the store has the workers of this node."""
        encoded = await self.store.get("epoch")
        if encoded is None:
            if await self.store.get("setup") is None:
                self._on_note(
                    f"node {self.node}: the store has no data of the run: the run has ended, or etcd was replaced; in "
                    "that case start etcd with its data, or start the run again with --resume"
                )
            return False
        epoch = messages.decode(encoded)
        assert isinstance(epoch, Epoch)
        own = [epoch.address(slot) for slot in epoch.slots_of_node(self.node)]
        return bool(own) and set(own) <= set(self._current_workers())

    def _current_workers(self) -> tuple[Address, ...]:
        """The addresses of the workers, once all of them are up."""
        return self._worker_addresses.result() if self._worker_addresses.done() else ()

    async def _participate_in_run(self) -> None:
        """Join, lead if there is no leader, and forward epochs until the run has a result."""
        # Register before the workers are up, so that a loss is noticed from the start.
        await self._write_node_record(self._current_workers() if self._has_new_session else ())
        setup = decode_setup(await self.store.get("setup") or b"")
        self._rejoin_within_s = setup.rejoin_within if setup.survives_losses else 0.0
        hang_detector = HangDetector(
            setup.suspect_after,
            max((part for costs in setup.costs for part in costs), default=0.0),
            workers_per_node=setup.workers_per_node,
        )
        leading = asyncio.create_task(self._lead_when_elected(setup, hang_detector))
        serving = asyncio.create_task(self._forward_epochs())
        ending = asyncio.create_task(self._wait_for_result())
        monitors = (
            [asyncio.create_task(self._monitor_peers(self._prober, hang_detector))] if self._prober is not None else []
        )
        try:
            await asyncio.wait([leading, ending, *monitors], return_when=asyncio.FIRST_COMPLETED)
            for task in (task for task in monitors if task.done()):
                task.result()  # it ends only with the store, or if this node hangs
            if leading.done():
                leading.result()  # a leader that failed ends its node, so that the others notice
            await ending
            self._run_ended = True
            self._send_to_workers(messages.encode(messages.StopNow()))
        finally:
            await _cancel_and_wait(leading, serving, ending, *monitors)

    async def _leave_on_notice(self) -> None:
        """On a preemption notice: publish it, and return when everything needed from this node has been handed over."""
        notice = await self._notice_source.wait()
        self._leaves_in_s = notice.deadline_s
        await self._write_node_record(self._current_workers())
        await self._may_leave_event.wait()

    def _send_to_workers(self, body: bytes) -> None:
        """Send a message to all workers, if all of them are up."""
        for address in self._current_workers():
            self.transport.send_message(address, body)

    async def _write_node_record(self, workers: tuple[Address, ...] = ()) -> None:
        seen = (self.fingerprint, self._leaves_in_s, self._incarnation, self.zone)
        record = NodeRecord(self.node, self.transport.address, workers, *seen, rental=self._rental)
        await self.store.put(f"nodes/{self.node}", encode(record), session=True)

    async def _lead_when_elected(self, setup: RunSetup, hang_detector: HangDetector) -> None:
        """Become the leader when there is none: first by winning the election, later when the leader is gone."""
        before, has_new_session = b"", self._has_new_session
        self._has_new_session = False
        async with aclosing(self.store.watch("leader")) as leaders:
            if not await self._try_election():
                has_new_session = False  # another node leads: it knows which sessions have ended
                async for _, value in leaders:
                    if value is None:
                        if not setup.survives_losses:  # the run cannot continue without the leader's layers: say so
                            lost = RunResult(
                                error=NodeLost.__name__, message=_leader_lost_message(before.decode(), setup)
                            )
                            await self.store.swap("result", None, encode(lost))
                        elif await self._try_election():
                            break
                    before = value or before
        if await self.store.get("result") is not None:
            return  # the previous leader has finished the run
        interfaces = (self.transport, self.clock, self.store)
        self._leader = Leader(
            self.job,
            setup,
            self.node,
            *interfaces,
            hang_detector,
            self._hooks,
            previous_leader=int(before) if before else None,
            sessions_expired=has_new_session,
            refuses_connection=self._refuses_connection,
            term=self._terms,
            simulated=self._simulated,
        )
        self._terms += 1
        self._leader.may_leave_event, self._leader.dismissed_event = self._may_leave_event, self._dismissed_event
        await self._leader.run()

    async def _monitor_peers(self, prober: LivenessProber, hang_detector: HangDetector) -> None:
        """Keep a connection to the leader's agent, so that each side notices when the other ends. On the leader's node:
        track all nodes and evict those that hang."""
        async for _, value in self.store.watch("leader"):
            if value == str(self.node).encode():
                break
            key = f"nodes/{(value or b'').decode()}"
            record = await self.store.get(key) if value is not None else None
            if record is not None:
                heartbeat = messages.encode(messages.Heartbeat(self.node, 0, 0, 0.0))
                self.transport.send_message(prober.add_node(key, record), heartbeat)
        tasks = [
            asyncio.create_task(work)
            for work in (self._track_nodes(prober), self._evict_hung_nodes(hang_detector, prober))
        ]
        try:
            for task in (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]:
                task.result()
        finally:
            await _cancel_and_wait(*tasks)

    async def _track_nodes(self, prober: LivenessProber) -> None:
        async for key, record in self.store.watch("nodes/"):
            if record is not None:
                prober.add_node(key, record)

    async def _evict_hung_nodes(self, hang_detector: HangDetector, prober: LivenessProber) -> None:
        """Evict nodes with a worker that hangs, and nodes that the leader gave up; they may rejoin as new nodes. If
        this node is one of them, raise, so that another node becomes the leader."""
        while True:
            await self.clock.sleep(hang_detector.timeouts.heartbeat)
            for node in hang_detector.take_nodes_to_evict(self.clock.now()):
                if node == self.node:
                    raise RunError("a worker of the leader's node hangs or cannot reach the others")
                if self._leader is not None:
                    self._leader.inbox.put_nowait(NodeEvicted(node))
                await prober.evict_node(f"nodes/{node}")

    async def _try_election(self) -> bool:
        return await self.store.swap("leader", None, str(self.node).encode(), session=True)

    async def _forward_epochs(self) -> None:
        """Register the workers when they are up, and forward every epoch to the current workers. An epoch published
        before restarted workers are up was meant for their predecessors."""
        await self._write_node_record(await self._worker_addresses)
        async for _, value in self.store.watch("announced"):
            if value is not None and value != self._forwarded_epoch:  # a new session starts with the current one
                self._forwarded_epoch = value
                await self._forward_epoch(messages.decode_announcement(value))
                if not self._simulated and self._leader is None:  # a leader does so itself
                    gc.collect()  # the last loss has left errors that refer to each other

    async def _forward_epoch(self, announcement: messages.EpochAnnouncement) -> None:
        """Send an announced epoch to the workers: what they need of it, or the whole of it from the store."""
        body: bytes | None = announcement.epoch
        if not body:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PART_TIMEOUT_S):
                    while not self._has_parts(announcement.digest):
                        self._part_arrived.clear()
                        await self._part_arrived.wait()
            if self._has_parts(announcement.digest):
                for address, worker in zip(self._worker_addresses.result(), self._own_workers, strict=True):
                    self.transport.send_message(address, self._parts[worker].body)
                return
            body = await self.store.get("epoch")
        if body is not None:
            self._send_to_workers(body)

    def _forward_part(self, part: messages.EpochPart) -> None:
        """Send a part of an epoch on to other agents. One that does not get it reads the whole epoch from the store."""
        for agent, others in forwarding_shares(part.forward_to):
            self.transport.send_message(agent, messages.encode(msgspec.structs.replace(part, forward_to=others)))

    @property
    def _own_workers(self) -> range:
        """The numbers of this node's workers in the run."""
        return range(self.node * self._workers_per_node, (self.node + 1) * self._workers_per_node)

    def _has_parts(self, digest: str) -> bool:
        """Whether all workers of the node have their part of an epoch."""
        return all(worker in self._parts and self._parts[worker].digest == digest for worker in self._own_workers)

    async def _wait_for_result(self) -> None:
        async with aclosing(self.store.watch("result")) as results:
            async for _, value in results:
                if value is not None:
                    return

    async def _read_messages(self) -> None:
        while True:
            sender, body = await self.transport.receive_message()
            if isinstance(self.store, RemoteStore) and sender == self.store.server:
                self.store.handle_answer(body)
                if body is None:
                    return  # the launcher is gone, and the run with it
            elif body is not None:
                self._handle_message(messages.decode(body))
            elif self._prober is not None:
                self._prober.handle_broken_connection(sender)

    def _handle_message(self, message: messages.Message) -> None:
        if isinstance(message, messages.WorkerStarted):
            self._started_workers.setdefault(message.worker, message.address)
            if len(self._started_workers) == self._workers_per_node and not self._worker_addresses.done():
                self._worker_addresses.set_result(tuple(at for _, at in sorted(self._started_workers.items())))
        elif isinstance(message, messages.EpochPart):
            self._forward_part(message)
            self._parts |= {worker: message for worker in self._own_workers if worker in message.workers}
            self._part_arrived.set()
        elif isinstance(message, messages.CollectReport):
            self._report_collector.add(message)
        elif isinstance(message, messages.StopNow):
            self._may_leave_event.set()
        elif isinstance(message, messages.Dismiss):
            self._dismissed_event.set()
        elif isinstance(message, messages.RestartWorker):
            if message.incarnation == self._incarnation:
                self._restart_requested.set()
        elif self._leader is not None:
            if isinstance(message, messages.FailureReport) and message.peer and self._prober is not None:
                # This agent may have no connection to that node, which would have broken, too.
                self._prober.handle_broken_connection(message.peer)
            self._leader.hang_detector.handle_message(message, self.clock.now())
            self._leader.receive(message)


def _succeeded(task: asyncio.Task[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None


async def _cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait for them. Ignores RunError, since an unreachable store is a normal end; raises
    others."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception) and not isinstance(outcome, RunError):
            raise outcome


def _leader_lost_message(node: str, setup: RunSetup) -> str:
    saved = f"resume it with --resume {setup.out} if it had a checkpoint" if setup.out else "nothing of it was saved"
    return f"node {node}, the leader, was lost and {setup.why_losses_are_final}: {saved}"
