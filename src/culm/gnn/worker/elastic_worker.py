"""An elastic worker: stateless, connects with the run's token, computes dense tasks, and may end at any moment.

It connects to the worker pool, learns the addresses of the servers, and gets tasks from graph servers. Rows come with a
task, or are read in shared memory if the server is on the same machine. Weights are pulled from the parameter servers,
version by version. A task is computed in a thread while the rows of the next one arrive; a short task is computed in
the event loop, since the switch to a thread would cost more. The worker keeps the forward cache of an interval for its
backward. If the backward runs on another worker, that one recomputes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from culm.errors import RunError
from culm.gnn.model.pass_steps import FEATURE_TABLE, PassStep
from culm.gnn.model.sparse_rows import SparseRows, to_sparse_rows
from culm.gnn.model.task_kernel import TaskKernel, TaskResult
from culm.gnn.scheduler.passes import Pass
from culm.gnn.server.weight_prediction import StashedWeights, from_wire_tensors
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.transport.shared_tables import map_tables
from culm.gnn.transport.tensor_link import TensorLink, connect_link

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.launch.launcher import Ticket
    from culm.gnn.model.dense_kernels import ForwardCache

HEARTBEAT_S = 1.0
_LEAVE_BEFORE_END_S = 1.0
"""A worker takes no more tasks this long before its lifetime ends."""
_KEPT_VERSIONS = 4
"""Versions that are kept per layer: the latest received, and those that queued tasks need. Others are requested
again."""
_INLINE_TASK_S = 0.02
"""A task whose last run was shorter than this is computed in the event loop: it delays nothing for long."""
_WORK_SLICE_S = 0.001
"""Time spent on short tasks before the event loop handles sockets again."""


def serve(ticket: Ticket) -> None:
    """Work until told to stop, until the worker pool is gone, or until the ticket's seconds are over."""
    torch.set_num_threads(1)
    with contextlib.suppress(RunError):  # the run has ended or rejected this worker; there is nothing to report to
        asyncio.run(_ElasticWorker(ticket).run())


@dataclass(eq=False)
class _QueuedTask:
    """A task with all its inputs except the weights."""

    server: TensorLink
    assignment: messages.TaskAssignment
    inputs: list[Tensor]
    arrived_at: float = 0.0
    follow_up: _QueuedTask | None = None
    """The task to continue with afterwards."""


class _ElasticWorker:
    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._name = f"{socket.gethostname()[:40]}.{os.getpid()}.{os.urandom(3).hex()}"
        self._ends_at = time.monotonic() + ticket.seconds
        self._stopped = asyncio.Event()
        self._wake = asyncio.Event()
        self._session: _WorkerSession | None = None
        self._session_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        address = f"{self._ticket.host}:{self._ticket.port}"
        own_name = f"worker {self._name} {self._ticket.run}"
        pool_link = await connect_link(
            address, self._ticket.token, own_name, self._handle_pool_message, lambda _: self._stopped.set()
        )
        while not self._stopped.is_set() and time.monotonic() < self._ends_at - _LEAVE_BEFORE_END_S:
            pool_link.send(messages.WorkerHeartbeat(os.getpid(), socket.gethostname()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    min(HEARTBEAT_S, max(0.0, self._ends_at - _LEAVE_BEFORE_END_S - time.monotonic()))
                ):
                    await self._stopped.wait()
        if self._session is not None:
            await self._session.finish_and_leave()
        pool_link.close()

    def _handle_pool_message(self, link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        del link, tensors
        if isinstance(message, messages.ServerAddresses):
            task = asyncio.get_running_loop().create_task(self._change_generation(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, messages.StopWorker):
            self._stopped.set()

    async def _change_generation(self, addresses: messages.ServerAddresses) -> None:
        """Disconnect from the servers of the old generation and connect to those of the new one."""
        async with self._session_lock:
            if self._session is not None:
                self._session.close()
            self._session = _WorkerSession(addresses, self._ticket.token, self._name)
            with contextlib.suppress(RunError):  # a server is already gone; new addresses will follow
                await self._session.connect()


class _WorkerSession:
    """State of a worker in one generation."""

    def __init__(self, addresses: messages.ServerAddresses, token: str, name: str) -> None:
        self._addresses, self._token, self._name = addresses, token, name
        self._kernel = TaskKernel(addresses.model, addresses.seed, addresses.train_vertices)
        self._graph_links: list[TensorLink] = []
        self._parameter_links: list[TensorLink] = []
        self._tables: dict[TensorLink, dict[str, Tensor]] = {}
        self._weights: dict[int, dict[int, StashedWeights]] = {}
        self._requested_versions: set[tuple[int, int]] = set()
        self._forward_caches: dict[tuple[TensorLink, int, int], tuple[int, ForwardCache]] = {}
        self._sparse_features: dict[tuple[TensorLink, int, int], SparseRows | None] = {}
        self._runnable: list[_QueuedTask] = []
        self._waiting_for_weights: list[_QueuedTask] = []
        self._wake = asyncio.Event()
        self._compute_thread = ThreadPoolExecutor(
            1, initializer=torch.set_num_threads, initargs=(1,)
        )  # set_num_threads applies per thread
        self._last_duration: dict[tuple[str, int, bool], float] = {}
        """Seconds of the last task of each step."""
        self._work_task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    async def connect(self) -> None:
        """Connect to all servers. Raises RunError if a server is gone."""
        own_name = f"worker {self._name} {self._addresses.generation}"
        for address in self._addresses.parameter_servers:
            self._parameter_links.append(
                await connect_link(address, self._token, own_name, self._handle_weights, self._handle_server_lost)
            )
        self._work_task = asyncio.get_running_loop().create_task(self._work_loop())
        for address in self._addresses.graph_servers:
            self._graph_links.append(
                await connect_link(
                    address, self._token, own_name, self._handle_server_message, self._handle_server_lost
                )
            )

    def close(self) -> None:
        for link in [*self._graph_links, *self._parameter_links]:
            link.close()
        if self._work_task is not None:
            self._work_task.cancel()
        self._compute_thread.shutdown(wait=False, cancel_futures=True)

    async def finish_and_leave(self) -> None:
        """Take no more tasks, finish the assigned ones, and disconnect."""
        for link in self._graph_links:
            link.send(messages.WorkerLeaving())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._idle.wait()
        await asyncio.gather(*(link.wait_until_drained() for link in self._graph_links))
        self.close()

    def _handle_server_lost(self, link: TensorLink) -> None:
        """Drop the tasks of a lost server. The worker pool will announce the next generation."""
        self._runnable = [task for task in self._runnable if task.server is not link]
        self._waiting_for_weights = [task for task in self._waiting_for_weights if task.server is not link]

    def _handle_weights(self, link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        if not isinstance(message, messages.WeightVersion):
            link.close()
            return
        versions = self._weights.setdefault(message.layer, {})
        versions.pop(message.version, None)
        versions[message.version] = from_wire_tensors(message.names, tensors)
        waited_for = {
            task.assignment.versions.get(message.layer) for task in (*self._runnable, *self._waiting_for_weights)
        }
        # In order of arrival: an old version that was requested arrived late and stays.
        for old in list(versions)[:-_KEPT_VERSIONS]:
            if old not in waited_for:
                del versions[old]
                self._requested_versions.discard((message.layer, old))
        waiting, self._waiting_for_weights = self._waiting_for_weights, []
        for task in waiting:
            self._enqueue(task)

    def _enqueue(self, task: _QueuedTask) -> None:
        if all(v in self._weights.get(layer, ()) for layer, v in task.assignment.versions.items()):
            self._runnable.append(task)
            self._wake.set()
        else:
            self._waiting_for_weights.append(task)

    def _handle_server_message(self, link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        match message:
            case messages.WorkerAccepted(_, layout):
                tables = None if layout is None else map_tables(layout)
                if tables is not None:
                    self._tables[link] = tables
                link.send(messages.WorkerReady(tables is not None))
            case messages.TaskAssignment() if self._addresses.latency_s > 0:
                asyncio.get_running_loop().call_later(
                    self._addresses.latency_s, self._accept_assignment, link, message, tensors
                )
            case messages.TaskAssignment():
                self._accept_assignment(link, message, tensors)
            case _:
                link.close()

    def _accept_assignment(self, link: TensorLink, assignment: messages.TaskAssignment, tensors: list[Tensor]) -> None:
        task = self._make_queued_task(link, assignment, tensors)
        if assignment.follow_up is not None:
            task.follow_up = self._make_queued_task(link, assignment.follow_up, tensors[len(assignment.slices) :])
        self._request_weights_and_enqueue(task)

    def _make_queued_task(
        self, link: TensorLink, assignment: messages.TaskAssignment, tensors: list[Tensor]
    ) -> _QueuedTask:
        tables = self._tables.get(link)
        count = len(assignment.slices)
        inputs = tensors[:count] if tables is None else [tables[t][a:b] for t, a, b in assignment.slices]
        return _QueuedTask(link, assignment, inputs)

    def _request_weights_and_enqueue(self, task: _QueuedTask) -> None:
        task.arrived_at = time.perf_counter()
        for layer, version in task.assignment.versions.items():
            self._request_weights(layer, version)
        self._enqueue(task)

    def _request_weights(self, layer: int, version: int) -> None:
        """Request a version unless it is present or requested. The server then sends newer versions without a
        request."""
        if version not in self._weights.get(layer, {}) and (layer, version) not in self._requested_versions:
            self._requested_versions.add((layer, version))
            self._parameter_links[layer % len(self._parameter_links)].send(messages.PullWeights(layer, version))

    async def _work_loop(self) -> None:
        until = time.perf_counter() + _WORK_SLICE_S
        while True:
            task = self._next_runnable()
            if task is None:
                if not self._waiting_for_weights:
                    self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            else:
                self._idle.clear()
                await self._run_task(task)
                if time.perf_counter() < until:
                    continue
                await asyncio.sleep(0)
            until = time.perf_counter() + _WORK_SLICE_S

    async def _run_task(self, task: _QueuedTask) -> None:
        forward_cache = self._take_forward_cache(task)
        if task.assignment.forward_kept and forward_cache is None:
            task.server.send(messages.TaskRefused(task.assignment.task))
            return
        graph_pass = Pass(*task.assignment.graph_pass)
        weights = {
            layer: self._weights[layer][v].predict(graph_pass.updates_behind(v))
            for layer, v in task.assignment.versions.items()
        }
        started_at = time.perf_counter()
        if self._last_duration.get(task.assignment.step, _INLINE_TASK_S) < _INLINE_TASK_S:
            result = self._compute(task, weights, forward_cache)
        else:
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._compute_thread, self._compute, task, weights, forward_cache)
        self._send_result(task, result, started_at)
        if task.follow_up is not None:
            self._request_weights_and_enqueue(task.follow_up)

    def _next_runnable(self) -> _QueuedTask | None:
        """Return the task of the oldest pass whose weights are present; None if there is none."""
        if not self._runnable:
            return None
        oldest = min(self._runnable, key=lambda task: task.assignment.task)
        self._runnable.remove(oldest)
        return oldest

    def _take_forward_cache(self, task: _QueuedTask) -> ForwardCache | None:
        if not task.assignment.forward_kept:
            return None
        number, forward_cache = self._forward_caches.pop(
            (task.server, task.assignment.task[2], task.assignment.step[1]), (-1, None)
        )
        return forward_cache if number == task.assignment.task[0] else None

    def _compute(
        self, task: _QueuedTask, weights: dict[int, dict[str, Tensor]], forward_cache: ForwardCache | None
    ) -> TaskResult:
        kind, layer, backward = task.assignment.step
        started_at = time.perf_counter()
        with torch.inference_mode():
            step, graph_pass = PassStep(kind, layer, backward, "worker"), Pass(*task.assignment.graph_pass)
            result = self._kernel.run_task(
                step, graph_pass, task.inputs, weights, forward_cache, self._sparse_features_of(task)
            )
        self._last_duration[task.assignment.step] = time.perf_counter() - started_at
        return result

    def _sparse_features_of(self, task: _QueuedTask) -> SparseRows | None:
        """Return the features that a task reads if they are sparse. Converted once, since features never change."""
        for (table, start, stop), rows in zip(task.assignment.slices, task.inputs, strict=True):
            if table == FEATURE_TABLE:
                place = (task.server, start, stop)
                if place not in self._sparse_features:
                    self._sparse_features[place] = to_sparse_rows(rows)
                return self._sparse_features[place]
        return None

    def _send_result(self, task: _QueuedTask, result: TaskResult, started_at: float) -> None:
        number, _, interval = task.assignment.task
        keeps_cache = result.forward_cache is not None and task.assignment.graph_pass[2]
        if keeps_cache and result.forward_cache is not None:
            self._forward_caches[task.server, interval, task.assignment.step[1]] = (number, result.forward_cache)
        gradients = [((layer, name), t) for layer, grads in result.gradients.items() for name, t in grads.items()]
        message = messages.TaskDone(
            task=task.assignment.task,
            has_rows=result.rows is not None,
            gradient_names=tuple(key for key, _ in gradients),
            loss=result.loss,
            counts=tuple(result.counts),
            compute_s=time.perf_counter() - started_at,
            waited_s=started_at - task.arrived_at,
            forward_kept=keeps_cache,
        )
        rows = [] if result.rows is None else [result.rows]
        task.server.send(message, [*rows, *(tensor for _, tensor in gradients)])
