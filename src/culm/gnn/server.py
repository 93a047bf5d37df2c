"""A graph server in one generation: the shell around board, shard and crew. Links in, links out, one thing at a time.

The loop runs the oldest step of its own, or waits. In between it hears: rows of other servers, results of workers,
versions of weights, permits. Tasks go to workers as soon as the board has them and somebody has room.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING

from culm.errors import RunError
from culm.gnn import messages as say
from culm.gnn.board import Board
from culm.gnn.compute import Kernel, Outcome
from culm.gnn.crew import Crew
from culm.gnn.link import Link, Listener, dial
from culm.gnn.lookahead import Stashed, received
from culm.gnn.notes import Notes
from culm.gnn.passes import Task, passes
from culm.gnn.program import Step, gradients_of, walk
from culm.gnn.setup import Generation, Permit, Setup, pack, unpack
from culm.gnn.share import share
from culm.gnn.tally import Tally

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.store import Store
    from culm.gnn.link import Heard
    from culm.gnn.model import Model

_TICK_S = 0.1
_MOMENT_S = 0.001


class GraphSession:
    """One graph server in one generation."""

    def __init__(self, store: Store, setup: Setup, number: int, token: str, generation: Generation) -> None:
        self._store, self._setup, self._number, self._token = store, setup, number, token
        self._generation = generation
        self._listener = Listener(token, self._accepted, setup.host)
        self.address = self._listener.address
        self._shard, feeds = share(setup, number)
        self._board = Board(
            setup.model,
            server=number,
            feeds=feeds,
            plan=passes(setup.epochs, setup.evaluate_every),
            mode=setup.mode,
            staleness=setup.staleness,
            start=generation.start,
            servers=setup.servers,
            edges=setup.edges,
        )
        self._board.permit(generation.start)
        self._kernel = Kernel(setup.model, setup.seed, setup.total)
        self._peers: dict[int, Link] = {}
        self._parameter: list[Link] = []
        self._biases: dict[tuple[int, int], Stashed] = {}
        self._tally = tallies(setup.model, self._shard.intervals)
        self._notes = Notes(number, generation.number, self._shard.intervals)
        self._crew = Crew(self._board, self._shard, self._notes, setup.in_flight, self._count)
        self._told = generation.start
        self._wake, self._broken = asyncio.Event(), asyncio.Event()

    # The generation.

    async def run(self, members: dict[str, str]) -> None:
        try:
            await self._meet(members)
        except RunError:  # somebody is gone already: this generation will not get anywhere
            self._broken.set()
            await self._alarm()
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._alarm())
            group.create_task(self._permits())
            group.create_task(self._ticks())
            group.create_task(self._reports())
            group.create_task(self._work())

    async def close(self) -> None:
        self._listener.close()
        for link in [*self._peers.values(), *self._parameter, *self._crew.links()]:
            link.close()

    async def _meet(self, members: dict[str, str]) -> None:
        """Call the servers with higher numbers and all parameter servers; those with lower numbers call us."""
        me = f"graph {self._number} {self._generation.number}"
        for seat in self._setup.parameter_seats:
            self._parameter.append(await dial(members[seat], self._token, me, self._heard_parameter, self._broke))
        for peer in range(self._number + 1, self._setup.servers):
            self._peers[peer] = await dial(
                members[f"graph-{peer}"], self._token, me, self._heard_peer(peer), self._broke
            )
        while len(self._peers) < self._setup.servers - 1:
            self._wake.clear()
            await self._wake.wait()

    def _accepted(self, name: str, sock: socket.socket) -> None:
        """A server or a worker calls; one of another generation is hung up on."""
        role, number, generation = (*name.split(" "), "", "")[:3]
        if generation != str(self._generation.number):
            sock.close()
        elif role == "graph":
            peer = int(number)
            self._peers[peer] = Link(sock, name, self._heard_peer(peer), self._broke)
            self._wake.set()
        else:
            link = Link(sock, name, self._heard_worker, self._lost_worker)
            self._crew.join(name, link)
            link.send(say.Welcome(self._number, self._shard.arena.layout if self._setup.share else None))

    def _broke(self, link: Link) -> None:
        """A server is gone, or the way to it: nothing of this generation can finish any more."""
        del link
        self._broken.set()

    async def _alarm(self) -> None:
        await self._broken.wait()
        await self._store.put(f"broken/{self._generation.number}", str(self._number).encode())

    async def _permits(self) -> None:
        async with contextlib.aclosing(self._store.watch("permit")) as changes:
            async for _, value in changes:
                permit = unpack(value, Permit) if value is not None else None
                if permit is not None and permit.generation == self._generation.number:
                    self._board.stop_after(permit.passes)
                    self._board.permit(permit.until)
                    self._wake.set()

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if self._board.overdue(time.monotonic()):
                self._crew.changed()
                self._wake.set()

    # The work.

    async def _work(self) -> None:
        while True:
            if self._steps():
                await asyncio.sleep(0)
                continue
            self._wake.clear()
            await self._wake.wait()

    def _steps(self) -> bool:
        """Give out and run what there is, for a moment: to listen between any two steps would cost more than the small
        ones take. Returns whether there may be more."""
        until = time.monotonic() + _MOMENT_S
        while True:
            self._crew.dispatch()
            task = self._board.next("server")
            if task is None:
                return False
            self._run(task)
            if time.monotonic() > until:
                return True

    def _run(self, task: Task) -> None:
        """A step of the server's own."""
        step = self._board.step(task)
        if step.kind == "SC":
            for peer, tensors in self._shard.outgoing(step, task.interval).items():
                if any(map(len, tensors)):  # who gets no rows of an interval never waits for any
                    self._peers[peer].send(say.Rows(task.number, step.layer, step.back, task.interval), tensors)
        elif step.kind == "GA":
            self._shard.gather(step, task.interval)
        else:
            self._apply_here(task, step)
            return
        self._finish(task)

    def _apply_here(self, task: Task, step: Step) -> None:
        """A step without a multiplication: attention over few edges, or the last bias and softmax."""
        self._shard.prepare(step, task.interval)
        now, versions = self._board.plan[task.number], self._board.versions(task)
        weights = {layer: self._biases[layer, v].ahead(now.behind(v)) for layer, v in versions.items()}
        inputs = self._shard.rows(self._shard.inputs(step, task.interval, kept=False))
        outcome = self._kernel.run(step, now, inputs, weights)
        self._count(task, step, outcome)

    def _count(self, task: Task, step: Step, outcome: Outcome) -> None:
        """A dense task is done for the first time: its rows and gradients count."""
        now = self._board.plan[task.number]
        self._shard.take(step, task.interval, outcome.rows)
        if step.layer == self._setup.model.layers and step.kind == "AV" and not step.back:
            self._notes.loss(now, task.interval, outcome)
        for layer, gradient in outcome.gradients.items():
            total = self._tally[layer].add(now.epoch, (task.interval, str(step)), gradient)
            if total is not None:
                self._contribute(now.epoch, layer, total)
        self._finish(task)

    def _contribute(self, epoch: int, layer: int, total: dict[str, Tensor]) -> None:
        message = say.Gradient(epoch, layer, self._number, self._shard.intervals, tuple(total))
        self._parameter[self._setup.home(layer)].send(message, list(total.values()))

    def _finish(self, task: Task) -> None:
        self._board.done(task, time.monotonic())
        slowest = self._board.own_slowest
        if slowest > self._told:
            self._told = slowest
            self._notes.passed(slowest - 1, time.monotonic())
            for peer in self._peers.values():
                peer.send(say.Slow(slowest))
            self._forget_versions()

    def _forget_versions(self) -> None:
        for layer in range(self._setup.model.layers):
            oldest = self._board.oldest_version(layer)
            self._parameter[self._setup.home(layer)].send(say.Oldest(self._number, layer, oldest))
            for known in [k for k in self._biases if k[0] == layer and k[1] < oldest]:
                del self._biases[known]

    # What is heard.

    def _heard_peer(self, peer: int) -> Heard:
        def heard(link: Link, message: say.Message, tensors: list[Tensor]) -> None:
            match message:
                case say.Rows(number, layer, back, interval):
                    self._shard.incoming(peer, layer, back, interval, tensors)
                    self._board.arrived((peer, interval), layer, back, number)
                case say.Slow(number):
                    self._board.progressed(peer, number)
                case _:
                    link.close()
            self._wake.set()

        return heard

    def _heard_parameter(self, link: Link, message: say.Message, tensors: list[Tensor]) -> None:
        del link
        if isinstance(message, say.Version):
            self._biases[message.layer, message.version] = received(["bias"], tensors)
            self._board.version(message.layer, message.version, time.monotonic())
            self._crew.changed()
            self._wake.set()

    def _heard_worker(self, link: Link, message: say.Message, tensors: list[Tensor]) -> None:
        self._crew.heard(link, message, tensors)
        self._wake.set()

    def _lost_worker(self, link: Link) -> None:
        self._crew.leave(link.name)
        self._wake.set()

    # What is told.

    async def _reports(self) -> None:
        while True:
            await self._notes.something()
            await self._store.put(
                f"report/graph-{self._number}", pack(self._notes.report(self._board, len(self._crew)))
            )


def tallies(model: Model, intervals: int) -> dict[int, Tally[tuple[int, str]]]:
    """By layer: whose gradients make up those of an epoch, every interval at every step that has some for it."""
    steps: dict[int, list[str]] = {layer: [] for layer in range(model.layers)}
    for step in walk(model, train=True):
        for layer in gradients_of(model, step):
            steps[layer].append(str(step))
    return {layer: Tally([(i, s) for i in range(intervals) for s in own]) for layer, own in steps.items()}
