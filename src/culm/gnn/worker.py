"""An elastic worker: stateless, dials back with the run's token, computes dense tasks, and may vanish at any moment.

It calls the desk, learns whom to call, and is given tasks by graph servers. Rows come with a task or are mapped where
the server is on the same machine; weights are pulled from the parameter servers, version by version. While one task is
computed in a thread, the rows of the next arrive; one that takes less than the way to a thread and back is worth is
computed on the spot. What a forward leaves is kept for the backward of the same interval,
in case it comes here; if not, whoever gets it makes it again.
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
from culm.gnn import messages as say
from culm.gnn.arena import mapped
from culm.gnn.compute import Kernel, Outcome
from culm.gnn.few import Few, few
from culm.gnn.link import Link, dial
from culm.gnn.lookahead import Stashed, received
from culm.gnn.passes import Pass
from culm.gnn.program import FEATURES, Step

if TYPE_CHECKING:
    from torch import Tensor

    from culm.gnn.dense import Kept
    from culm.gnn.launch.base import Ticket

BEAT_S = 1.0
_LEAVE_S = 1.0
"""Before its time is over a worker takes no more tasks."""
_VERSIONS = 4
"""Of a layer's weights that are kept: the last that came, and what tasks here wait for. Other tasks ask again."""
_BRIEF_S = 0.02
"""A task that took less last time goes without a thread: nobody is kept waiting for long."""
_MOMENT_S = 0.001
"""Of brief tasks, one after the other, between two looks at the sockets."""


def serve(ticket: Ticket) -> None:
    """Work until told to stop, until nobody is there any more, or until the ticket's seconds are over."""
    torch.set_num_threads(1)
    with contextlib.suppress(RunError):  # the run has ended, or never let us in: there is nobody to tell
        asyncio.run(_Worker(ticket).run())


@dataclass(eq=False)
class _Job:
    """A task with all it needs but weights."""

    server: Link
    work: say.Work
    inputs: list[Tensor]
    arrived: float = 0.0
    then: _Job | None = None
    """What to go on with afterwards."""


class _Worker:
    def __init__(self, ticket: Ticket) -> None:
        self._ticket = ticket
        self._name = f"{socket.gethostname()[:40]}.{os.getpid()}.{os.urandom(3).hex()}"
        self._ends = time.monotonic() + ticket.seconds
        self._over = asyncio.Event()
        self._wake = asyncio.Event()
        self._generation: _Generation | None = None
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        address = f"{self._ticket.host}:{self._ticket.port}"
        me = f"worker {self._name} {self._ticket.run}"
        desk = await dial(address, self._ticket.token, me, self._heard_desk, lambda _: self._over.set())
        while not self._over.is_set() and time.monotonic() < self._ends - _LEAVE_S:
            desk.send(say.Hello(os.getpid(), socket.gethostname()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(BEAT_S, max(0.0, self._ends - _LEAVE_S - time.monotonic()))):
                    await self._over.wait()
        if self._generation is not None:
            await self._generation.leave()
        desk.close()

    def _heard_desk(self, link: Link, message: say.Message, tensors: list[Tensor]) -> None:
        del link, tensors
        if isinstance(message, say.Roster):
            task = asyncio.get_running_loop().create_task(self._change(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, say.Stop):
            self._over.set()

    async def _change(self, roster: say.Roster) -> None:
        """Another generation: leave everyone of the old one and call the new."""
        async with self._changing:
            if self._generation is not None:
                self._generation.close()
            self._generation = _Generation(roster, self._ticket.token, self._name)
            with contextlib.suppress(RunError):  # somebody is gone already: the next roster follows
                await self._generation.begin()


class _Generation:
    """Everything a worker has in one generation."""

    def __init__(self, roster: say.Roster, token: str, name: str) -> None:
        self._roster, self._token, self._name = roster, token, name
        self._kernel = Kernel(roster.model, roster.seed, roster.total)
        self._servers: list[Link] = []
        self._parameter: list[Link] = []
        self._tables: dict[Link, dict[str, Tensor]] = {}
        self._weights: dict[int, dict[int, Stashed]] = {}
        self._asked: set[tuple[int, int]] = set()
        self._kept: dict[tuple[Link, int, int], tuple[int, Kept]] = {}
        self._few: dict[tuple[Link, int, int], Few | None] = {}
        self._able: list[_Job] = []
        self._waiting: list[_Job] = []
        """For weights."""
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))  # it holds by thread
        self._took: dict[tuple[str, int, bool], float] = {}
        """Seconds of the last task of a step."""
        self._working: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    async def begin(self) -> None:
        """Call everyone. Raises RunError if somebody is gone."""
        me = f"worker {self._name} {self._roster.generation}"
        for address in self._roster.parameter:
            self._parameter.append(await dial(address, self._token, me, self._heard_weights, self._lost))
        self._working = asyncio.get_running_loop().create_task(self._work())
        for address in self._roster.graph:
            self._servers.append(await dial(address, self._token, me, self._heard_server, self._lost))

    def close(self) -> None:
        for link in [*self._servers, *self._parameter]:
            link.close()
        if self._working is not None:
            self._working.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def leave(self) -> None:
        """Take no more, finish what there is, and go."""
        for link in self._servers:
            link.send(say.Leaving())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await self._idle.wait()
        await asyncio.gather(*(link.drained() for link in self._servers))
        self.close()

    def _lost(self, link: Link) -> None:
        """A server is gone. The desk will say how it goes on; its tasks are nobody's any more."""
        self._able = [job for job in self._able if job.server is not link]
        self._waiting = [job for job in self._waiting if job.server is not link]

    def _heard_weights(self, link: Link, message: say.Message, tensors: list[Tensor]) -> None:
        if not isinstance(message, say.Weights):
            link.close()
            return
        versions = self._weights.setdefault(message.layer, {})
        versions.pop(message.version, None)
        versions[message.version] = received(message.names, tensors)
        waited_for = {job.work.versions.get(message.layer) for job in (*self._able, *self._waiting)}
        for old in list(versions)[:-_VERSIONS]:  # what came first goes: an old version that was asked for came late
            if old not in waited_for:
                del versions[old]
                self._asked.discard((message.layer, old))
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._line_up(job)

    def _line_up(self, job: _Job) -> None:
        if all(v in self._weights.get(layer, ()) for layer, v in job.work.versions.items()):
            self._able.append(job)
            self._wake.set()
        else:
            self._waiting.append(job)

    def _heard_server(self, link: Link, message: say.Message, tensors: list[Tensor]) -> None:
        match message:
            case say.Welcome(_, layout):
                tables = None if layout is None else mapped(layout)
                if tables is not None:
                    self._tables[link] = tables
                link.send(say.Ready(tables is not None))
            case say.Work() if self._roster.latency_s > 0:
                asyncio.get_running_loop().call_later(self._roster.latency_s, self._take, link, message, tensors)
            case say.Work():
                self._take(link, message, tensors)
            case _:
                link.close()

    def _take(self, link: Link, work: say.Work, tensors: list[Tensor]) -> None:
        job = self._job(link, work, tensors)
        if work.then is not None:
            job.then = self._job(link, work.then, tensors[len(work.pieces) :])
        self._queue(job)

    def _job(self, link: Link, work: say.Work, tensors: list[Tensor]) -> _Job:
        tables = self._tables.get(link)
        count = len(work.pieces)
        inputs = tensors[:count] if tables is None else [tables[t][a:b] for t, a, b in work.pieces]
        return _Job(link, work, inputs)

    def _queue(self, job: _Job) -> None:
        job.arrived = time.perf_counter()
        for layer, version in job.work.versions.items():
            self._pull(layer, version)
        self._line_up(job)

    def _pull(self, layer: int, version: int) -> None:
        """Ask for a version that is not there. The server sends newer ones unasked from then on."""
        if version not in self._weights.get(layer, {}) and (layer, version) not in self._asked:
            self._asked.add((layer, version))
            self._parameter[layer % len(self._parameter)].send(say.Pull(layer, version))

    async def _work(self) -> None:
        until = time.perf_counter() + _MOMENT_S
        while True:
            job = self._next()
            if job is None:
                if not self._waiting:
                    self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            else:
                self._idle.clear()
                await self._do(job)
                if time.perf_counter() < until:
                    continue
                await asyncio.sleep(0)
            until = time.perf_counter() + _MOMENT_S

    async def _do(self, job: _Job) -> None:
        kept = self._take_kept(job)
        if job.work.kept and kept is None:
            job.server.send(say.Refuse(job.work.task))
            return
        now = Pass(*job.work.now)
        weights = {layer: self._weights[layer][v].ahead(now.behind(v)) for layer, v in job.work.versions.items()}
        begun = time.perf_counter()
        if self._took.get(job.work.step, _BRIEF_S) < _BRIEF_S:
            outcome = self._compute(job, weights, kept)
        else:
            loop = asyncio.get_running_loop()
            outcome = await loop.run_in_executor(self._thread, self._compute, job, weights, kept)
        self._answer(job, outcome, begun)
        if job.then is not None:
            self._queue(job.then)

    def _next(self) -> _Job | None:
        """The task of the oldest pass of those whose weights are there."""
        if not self._able:
            return None
        oldest = min(self._able, key=lambda job: job.work.task)
        self._able.remove(oldest)
        return oldest

    def _take_kept(self, job: _Job) -> Kept | None:
        if not job.work.kept:
            return None
        number, kept = self._kept.pop((job.server, job.work.task[2], job.work.step[1]), (-1, None))
        return kept if number == job.work.task[0] else None

    def _compute(self, job: _Job, weights: dict[int, dict[str, Tensor]], kept: Kept | None) -> Outcome:
        kind, layer, back = job.work.step
        begun = time.perf_counter()
        with torch.inference_mode():
            step, now = Step(kind, layer, back, "worker"), Pass(*job.work.now)
            outcome = self._kernel.run(step, now, job.inputs, weights, kept, self._features(job))
        self._took[job.work.step] = time.perf_counter() - begun
        return outcome

    def _features(self, job: _Job) -> Few | None:
        """Those that a task reads, where they are few: found once, since they never change."""
        for (table, start, stop), rows in zip(job.work.pieces, job.inputs, strict=True):
            if table == FEATURES:
                place = (job.server, start, stop)
                if place not in self._few:
                    self._few[place] = few(rows)
                return self._few[place]
        return None

    def _answer(self, job: _Job, outcome: Outcome, begun: float) -> None:
        number, _, interval = job.work.task
        keeps = outcome.kept is not None and job.work.now[2]
        if keeps and outcome.kept is not None:
            self._kept[job.server, interval, job.work.step[1]] = (number, outcome.kept)
        named = [((layer, name), t) for layer, own in outcome.gradients.items() for name, t in own.items()]
        message = say.Done(
            task=job.work.task,
            rows=outcome.rows is not None,
            named=tuple(key for key, _ in named),
            loss=outcome.loss,
            counts=tuple(outcome.counts),
            seconds=time.perf_counter() - begun,
            waited=begun - job.arrived,
            kept=keeps,
        )
        rows = [] if outcome.rows is None else [outcome.rows]
        job.server.send(message, [*rows, *(tensor for _, tensor in named)])
