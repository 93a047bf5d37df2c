"""A graph server in one generation: connects scheduler, shard and workers through links and the store.

The work loop runs the oldest ready step of the server itself, or waits. In between, the event loop handles rows of
other servers, results of workers, versions of weights, and permits. Tasks are sent to workers as soon as they are ready
and a worker has capacity. An epoch here is a training epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.gnn.model.pass_steps import PassStep, layers_with_gradients, steps_of_pass
from culm.gnn.model.task_kernel import TaskKernel, TaskResult
from culm.gnn.scheduler.interval_scheduler import IntervalScheduler
from culm.gnn.scheduler.passes import IntervalTask, list_passes
from culm.gnn.server.gradient_reducer import GradientReducer
from culm.gnn.server.graph_shard import load_shard
from culm.gnn.server.report_buffer import ReportBuffer
from culm.gnn.server.store_records import Generation, GnnRunConfig, PassPermit, pack_record, unpack_record
from culm.gnn.server.task_dispatcher import TaskDispatcher
from culm.gnn.server.weight_prediction import StashedWeights, from_wire_tensors
from culm.gnn.transport import gnn_messages as messages
from culm.gnn.transport.link_listener import LinkListener
from culm.gnn.transport.tensor_link import TensorLink, connect_link

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.store.store import Store
    from culm.gnn.model.gnn_model import GnnModel
    from culm.gnn.transport.tensor_link import MessageHandler
    from culm.transport.frames.handshake import FrameSocket

_TICK_S = 0.1
_WORK_SLICE_S = 0.001


class GraphServerSession:
    """One graph server in one generation."""

    def __init__(self, store: Store, config: GnnRunConfig, server: int, token: str, generation: Generation) -> None:
        self._store, self._config, self._server, self._token = store, config, server, token
        self._generation = generation
        self._listener = LinkListener(token, self._handle_connection, config.host)
        self.address = self._listener.address
        self._shard, gather_sources = load_shard(config, server)
        self._scheduler = IntervalScheduler(
            config.model,
            server=server,
            gather_sources=gather_sources,
            passes=list_passes(config.epochs, config.evaluate_every),
            mode=config.mode,
            staleness=config.staleness,
            start_pass=generation.start_pass,
            servers=config.servers,
            edge_place=config.edge_place,
        )
        self._scheduler.permit_passes(generation.start_pass)
        self._kernel = TaskKernel(config.model, config.seed, config.train_vertices)
        self._peer_links: dict[int, TensorLink] = {}
        self._parameter_links: list[TensorLink] = []
        self._biases: dict[tuple[int, int], StashedWeights] = {}
        self._reducers = make_gradient_reducers(config.model, self._shard.intervals)
        self._report_buffer = ReportBuffer(server, generation.number, self._shard.intervals)
        self._dispatcher = TaskDispatcher(
            self._scheduler, self._shard, self._report_buffer, config.tasks_per_worker, self._handle_task_result
        )
        self._announced_pass = generation.start_pass
        self._wake, self._link_broken = asyncio.Event(), asyncio.Event()

    # Life cycle.

    async def run(self, members: dict[str, str]) -> None:
        try:
            await self._connect_servers(members)
        except RunError:  # a server is already gone: this generation cannot finish
            self._link_broken.set()
            await self._report_broken_link()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report_broken_link())
            group.create_task(self._watch_permits())
            group.create_task(self._relaunch_overdue_tasks())
            group.create_task(self._send_reports())
            group.create_task(self._work_loop())

    async def close(self) -> None:
        self._listener.close()
        for link in [*self._peer_links.values(), *self._parameter_links, *self._dispatcher.worker_links()]:
            link.close()

    async def _connect_servers(self, members: dict[str, str]) -> None:
        """Dial the graph servers with higher numbers and all parameter servers. Graph servers with lower numbers
        dial this one."""
        own_name = f"graph {self._server} {self._generation.number}"
        for server_id in self._config.parameter_server_ids:
            self._parameter_links.append(
                await connect_link(
                    members[server_id], self._token, own_name, self._handle_parameter_message, self._handle_link_lost
                )
            )
        for peer in range(self._server + 1, self._config.servers):
            self._peer_links[peer] = await connect_link(
                members[f"graph-{peer}"],
                self._token,
                own_name,
                self._peer_message_handler(peer),
                self._handle_link_lost,
            )
        while len(self._peer_links) < self._config.servers - 1:
            self._wake.clear()
            await self._wake.wait()

    def _handle_connection(self, name: str, sock: FrameSocket) -> None:
        """Accept a server or a worker; close the connection if it belongs to another generation."""
        role, number, generation = (*name.split(" "), "", "")[:3]
        if generation != str(self._generation.number):
            sock.close()
        elif role == "graph":
            peer = int(number)
            self._peer_links[peer] = TensorLink(sock, name, self._peer_message_handler(peer), self._handle_link_lost)
            self._wake.set()
        else:
            link = TensorLink(sock, name, self._handle_worker_message, self._handle_worker_lost)
            self._dispatcher.add_worker(name, link)
            link.send(
                messages.WorkerAccepted(
                    self._server, self._shard.shared_tables.layout if self._config.share_tables else None
                )
            )

    def _handle_link_lost(self, link: TensorLink) -> None:
        """Note that the connection to another server is lost: this generation cannot finish."""
        del link
        self._link_broken.set()

    async def _report_broken_link(self) -> None:
        await self._link_broken.wait()
        await self._store.put(f"broken/{self._generation.number}", str(self._server).encode())

    async def _watch_permits(self) -> None:
        async with contextlib.aclosing(self._store.watch("permit")) as changes:
            async for _, value in changes:
                permit = unpack_record(value, PassPermit) if value is not None else None
                if permit is not None and permit.generation == self._generation.number:
                    self._scheduler.stop_before(permit.total_passes)
                    self._scheduler.permit_passes(permit.permitted_passes)
                    self._wake.set()

    async def _relaunch_overdue_tasks(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._scheduler.relaunch_overdue(time.monotonic()):
                self._dispatcher.mark_capacity_changed()
                self._wake.set()

    # Tasks.

    async def _work_loop(self) -> None:
        while True:
            if self._run_ready_steps():
                await asyncio.sleep(0)
                continue
            self._wake.clear()
            await self._wake.wait()

    def _run_ready_steps(self) -> bool:
        """Dispatch tasks and run the server's own steps for up to `_WORK_SLICE_S`. Returns whether there may be
        more.

        Yielding to the event loop after every step would cost more than a small step.
        """
        until = time.monotonic() + _WORK_SLICE_S
        while True:
            self._dispatcher.dispatch_ready_tasks()
            task = self._scheduler.next_task("server")
            if task is None:
                return False
            self._run_server_step(task)
            if time.monotonic() > until:
                return True

    def _run_server_step(self, task: IntervalTask) -> None:
        """Run a step on this server."""
        step = self._scheduler.step_of(task)
        if step.kind == "SC":
            for peer, tensors in self._shard.rows_to_scatter(step, task.interval).items():
                if any(map(len, tensors)):  # a peer without ghosts in the interval does not wait for rows
                    self._peer_links[peer].send(
                        messages.ScatteredRows(task.pass_number, step.layer, step.backward, task.interval), tensors
                    )
        elif step.kind == "GA":
            self._shard.gather(step, task.interval)
        else:
            self._apply_on_server(task, step)
            return
        self._complete_task(task)

    def _apply_on_server(self, task: IntervalTask, step: PassStep) -> None:
        """Run a dense step without a product: attention over few edges, or the last bias and softmax."""
        self._shard.prepare_edge_inputs(step, task.interval)
        graph_pass, versions = self._scheduler.passes[task.pass_number], self._scheduler.pin_versions(task)
        weights = {
            layer: self._biases[layer, version].predict(graph_pass.updates_behind(version))
            for layer, version in versions.items()
        }
        inputs = self._shard.read_slices(self._shard.task_inputs(step, task.interval, forward_kept=False))
        result = self._kernel.run_task(step, graph_pass, inputs, weights)
        self._handle_task_result(task, step, result)

    def _handle_task_result(self, task: IntervalTask, step: PassStep, result: TaskResult) -> None:
        """Store the rows and add the gradients of a dense task that is done for the first time."""
        graph_pass = self._scheduler.passes[task.pass_number]
        self._shard.store_result(step, task.interval, result.rows)
        if step.layer == self._config.model.layers and step.kind == "AV" and not step.backward:
            self._report_buffer.add_loss(graph_pass, task.interval, result)
        for layer, gradient in result.gradients.items():
            total = self._reducers[layer].add(graph_pass.epoch, (task.interval, str(step)), gradient)
            if total is not None:
                self._send_gradient(graph_pass.epoch, layer, total)
        self._complete_task(task)

    def _send_gradient(self, epoch: int, layer: int, gradient: dict[str, Tensor]) -> None:
        message = messages.ServerGradient(epoch, layer, self._server, self._shard.intervals, tuple(gradient))
        self._parameter_links[self._config.parameter_server_of(layer)].send(message, list(gradient.values()))

    def _complete_task(self, task: IntervalTask) -> None:
        self._scheduler.complete_task(task, time.monotonic())
        slowest = self._scheduler.own_slowest_pass
        if slowest > self._announced_pass:
            self._announced_pass = slowest
            self._report_buffer.add_pass_end(slowest - 1, time.monotonic())
            for peer in self._peer_links.values():
                peer.send(messages.SlowestPass(slowest))
            self._release_versions()

    def _release_versions(self) -> None:
        for layer in range(self._config.model.layers):
            oldest = self._scheduler.oldest_needed_version(layer)
            self._parameter_links[self._config.parameter_server_of(layer)].send(
                messages.OldestNeededVersion(self._server, layer, oldest)
            )
            for known in [k for k in self._biases if k[0] == layer and k[1] < oldest]:
                del self._biases[known]

    # Messages.

    def _peer_message_handler(self, peer: int) -> MessageHandler:
        def handle_message(link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
            match message:
                case messages.ScatteredRows(pass_number, layer, backward, interval):
                    self._shard.store_scattered_rows(peer, layer, backward, interval, tensors)
                    self._scheduler.record_rows((peer, interval), layer, backward, pass_number)
                case messages.SlowestPass(pass_number):
                    self._scheduler.record_peer_progress(peer, pass_number)
                case _:
                    link.close()
            self._wake.set()

        return handle_message

    def _handle_parameter_message(self, link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        del link
        if isinstance(message, messages.NewVersion):
            self._biases[message.layer, message.version] = from_wire_tensors(["bias"], tensors)
            self._scheduler.record_version(message.layer, message.version, time.monotonic())
            self._dispatcher.mark_capacity_changed()
            self._wake.set()

    def _handle_worker_message(self, link: TensorLink, message: messages.GnnMessage, tensors: list[Tensor]) -> None:
        self._dispatcher.handle_message(link, message, tensors)
        self._wake.set()

    def _handle_worker_lost(self, link: TensorLink) -> None:
        self._dispatcher.remove_worker(link.name)
        self._wake.set()

    # Reports.

    async def _send_reports(self) -> None:
        while True:
            await self._report_buffer.wait_until_due()
            await self._store.put(
                f"report/graph-{self._server}",
                pack_record(self._report_buffer.take_report(self._scheduler, len(self._dispatcher))),
            )


def make_gradient_reducers(model: GnnModel, intervals: int) -> dict[int, GradientReducer[tuple[int, str]]]:
    """Return, by layer, the reducer of a training epoch's gradients: one contribution per interval and step with a
    gradient."""
    steps: dict[int, list[str]] = {layer: [] for layer in range(model.layers)}
    for pass_step in steps_of_pass(model, train=True):
        for layer in layers_with_gradients(model, pass_step):
            steps[layer].append(str(pass_step))
    return {
        layer: GradientReducer([(interval, step) for interval in range(intervals) for step in layer_steps])
        for layer, layer_steps in steps.items()
    }
