"""A whole cluster in one process: the same agents, leader and workers as in production over simulated seams."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import torch

from culm.cluster.agent import Agent
from culm.cluster.notice import Notice
from culm.cluster.prepare import Request, prepare
from culm.cluster.setup import Result, Setup, decode_result, encode
from culm.cluster.store import MemoryStore
from culm.job import Job
from culm.runtime.state import Snapshot
from culm.runtime.worker import Worker
from culm.testing.fate import Fate, Strike
from culm.testing.faults import Faults
from culm.testing.history import History
from culm.testing.loop import VirtualClock, run_virtual, seldom_collected, virtual_loop
from culm.testing.machines import Machines
from culm.transport.memory import MemoryNetwork

NO_FAULTS = Faults()
LEASE_S = 2.0
"""After how many seconds a silent node counts as gone: what etcd grants at the least."""


@dataclass
class Simulated:
    """What a simulated run comes to: its summary, the losses by step, and the state at the end."""

    summary: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    snapshot: Snapshot = field(default_factory=Snapshot)
    virtual_s: float = 0.0
    history: History = field(default_factory=History)
    strikes: tuple[Strike, ...] = ()
    """The faults whose moment came, and when."""
    told: tuple[tuple[int, float | None], ...] = ()
    """(step, loss) as the store heard of it: a step that was made again is there twice, one that was committed while
    the store was away not at all."""

    def missed(self, faults: Faults) -> list[str]:
        """The faults of a schedule whose moment never came."""
        struck = [strike.fault for strike in self.strikes]
        return [str(fault) for fault in faults.all if fault not in struck]

    @property
    def evaluations(self) -> dict[int, float]:
        """The loss of each evaluation, by the step after which it was made."""
        return {int(step): loss for step, loss in self.summary["evaluations"].items()}

    @property
    def weights_sha256(self) -> str:
        return str(self.summary["weights_sha256"])

    @property
    def state_sha256(self) -> str:
        return str(self.summary["state_sha256"])


def simulate(
    job: Job,
    *,
    faults: Faults = NO_FAULTS,
    seed: int = 0,
    cost: Callable[[int, int, str], float] | None = None,
    latency: float = 0.0,
    lease_s: float = LEASE_S,
    script: Script | None = None,
    zones: Sequence[str] = (),
    **request: Any,
) -> Simulated:
    """Train a job on a simulated cluster; the arguments are those of `culm.train`. Raises what a real run would, or
    Deadlock where a real one would hang; the history of the run is a note of the error.

    `faults` say what befalls the cluster, and `seed` decides what is random about them. `cost` says how many virtual
    seconds an action of a node takes in a step, `latency` how many anything is on its way, and `lease_s` after how many
    a silent node counts as gone. `script` is a coroutine beside the run that may hurt it: see `Cluster.kill`.
    Nodes come out of the `zones` in turn.
    """
    setup = prepare(job, Request(**request))
    ways: dict[str, Any] = {"cost": cost, "latency": latency, "lease_s": lease_s, "script": script, "zones": zones}
    return enact(job, setup, faults=faults, seed=seed, **ways)


@seldom_collected()
def enact(
    job: Job,
    setup: Setup,
    *,
    faults: Faults = NO_FAULTS,
    seed: int = 0,
    cost: Callable[[int, int, str], float] | None = None,
    latency: float = 0.0,
    lease_s: float = LEASE_S,
    script: Script | None = None,
    zones: Sequence[str] = (),
) -> Simulated:
    """`simulate` for what has been prepared already: many runs of one setup."""
    seams = (VirtualClock(cost), MemoryNetwork(latency))
    cluster = Cluster(job, setup, *seams, faults=faults, seed=seed, lease_s=lease_s, zones=zones)
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        return run_virtual(cluster.run(script))
    except Exception as error:
        error.add_note(f"{faults}, seed {seed}:\n{cluster.history}")
        raise
    finally:
        torch.set_num_threads(before)


class _Notices:
    """Where a simulated node hears that it is to go."""

    def __init__(self) -> None:
        self._given: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()

    def give(self, seconds: float) -> None:
        if not self._given.done():
            self._given.set_result(Notice(seconds, "simulated"))

    async def wait(self) -> Notice:
        return await asyncio.shield(self._given)


class Cluster:
    """The nodes of one run, in this process and in virtual time."""

    def __init__(
        self,
        job: Job,
        setup: Setup,
        clock: VirtualClock,
        network: MemoryNetwork,
        *,
        faults: Faults = NO_FAULTS,
        seed: int = 0,
        lease_s: float = LEASE_S,
        zones: Sequence[str] = (),
    ) -> None:
        self._zones = tuple(zones) or ("",)
        self.job, self.setup, self.clock, self.network = job, setup, clock, network
        self.store = MemoryStore()
        self.store.write("setup", encode(setup))
        self.workers: dict[int, Worker] = {}
        self._nodes: dict[int, asyncio.Task[None]] = {}
        self._notices: dict[int, _Notices] = {}
        self.history = History()
        self.machines = Machines(network, self.store, self.history, lease_s)
        self.fate = Fate(
            faults,
            self.machines,
            nodes=setup.nodes,
            add=self.add,
            warn=self.warn,
            wish=self.wish,
            latency=network.latency,
            seed=seed,
        )
        clock.hurt, network.way = self.fate, self.fate.way

    async def run(self, script: Script | None = None) -> Simulated:
        """From the first node to the result; afterwards nothing of it runs any more."""
        steps = self.store.subscribe("step")
        result_at: list[float] = []
        self.store.listen("", self.history.heard)
        self.store.listen("result", lambda _: result_at.append(self.clock.now()))
        for _ in range(self.setup.nodes):
            self.add()
        self.fate.begin()
        virtual_loop().explain_deadlocks(self.waits)
        scripted = [asyncio.ensure_future(script(self))] if script is not None else []
        running = asyncio.ensure_future(self._all_ended())
        both: list[asyncio.Future[Any]] = [running, *scripted]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for ended in (task for task in scripted if task.done()):
                ended.result()
            await running
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            await self._end_nodes()
        result = decode_result(self.store.read("result") or encode(_NO_RESULT))
        if result.summary is None:
            raise result.failure()
        heard = [msgspec.msgpack.decode(steps.get_nowait().value or b"") for _ in range(steps.qsize())]
        told = tuple((step["step"], step["loss"]) for step in heard)
        losses = [loss for _, loss in told]
        strikes = tuple(self.fate.strikes)
        return Simulated(result.summary, losses, self._snapshot(), result_at[0], self.history, strikes, told)

    def add(self) -> int:
        """A node comes, with the next number, and joins the run if there is room for it."""
        number = len(self._nodes)
        self._notices[number] = _Notices()
        self._nodes[number] = virtual_loop().on_node(number, self._node(number))
        return number

    async def _all_ended(self) -> None:
        """Until nothing runs on any node, also of those that come meanwhile. Raises what a node raised."""
        while running := [task for task in self._nodes.values() if not task.done()]:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _end_nodes(self) -> None:
        for task in self._nodes.values():
            task.cancel()
        await asyncio.gather(*self._nodes.values(), return_exceptions=True)

    def kill(self, node: int) -> None:
        """Take a node away without notice: nothing is heard of it again, and every connection to it breaks."""
        self.machines.kill([node])

    def warn(self, node: int, seconds: float) -> None:
        """Give a node notice: it vanishes after so many seconds, unless it has gone before. One that has not come yet
        hears of nothing."""
        if node not in self._nodes:
            return
        self.history.note(node, f"has {seconds:g} s of notice")
        self._notices[node].give(seconds)

        def vanish() -> None:
            if not self._nodes[node].done() and node not in self.machines.gone:
                self.kill(node)

        asyncio.get_running_loop().call_later(seconds, vanish, context=Context())

    def wish(self, layout: str) -> None:
        """Ask for another layout of the pipelines, as somebody outside would."""
        self.store.write("wish/layout", layout.encode())

    def waits(self) -> str:
        """What everybody waits for, and where the code of each node is: a line each."""
        nodes = (n for n in self._nodes if n not in self.machines.gone)
        places = (f"node {n} is at {', '.join(filter(None, virtual_loop().places(n)))}" for n in nodes)
        return "".join(f"\n    {line}" for line in (*self.network.waits(), *places))

    async def committed(self, step: int) -> None:
        """Wait until a step is committed."""
        steps = self.store.subscribe("step")
        while msgspec.msgpack.decode((await steps.get()).value or b"")["step"] < step:
            pass

    async def _node(self, number: int) -> None:
        """A node: an agent, which starts a worker."""

        lives = itertools.count()

        async def start_worker(agent: str) -> None:
            life = next(lives)
            endpoint = self.network.endpoint(f"worker.{life}-{number}" if life else f"worker-{number}")
            worker = self.workers[number] = Worker(self.job, number, agent, endpoint, self.clock)
            try:
                await worker.run()
            finally:
                await endpoint.close()

        endpoint = self.network.endpoint(f"agent-{number}")
        client = self.machines.session(number)
        try:
            seams = (endpoint, self.clock, client)
            zone = self._zones[number % len(self._zones)]
            await Agent(self.job, number, "simulated", *seams, start_worker, self._notices[number], zone=zone).run()
        except asyncio.CancelledError:
            if number not in self.machines.gone:
                raise
        finally:
            self.machines.end_session(number)
            await endpoint.close()

    def _snapshot(self) -> Snapshot:
        """The model, each layer from a holder that has made every step."""
        found = Snapshot()
        alive = [worker for node, worker in self.workers.items() if node not in self.machines.gone]
        held = [holding for worker in alive if worker.desk is not None for holding in worker.desk.holdings.values()]
        for holding in sorted(held, key=lambda holding: holding.version):  # a copy that was on its way may be behind
            found.update(holding.state.snapshot())
        return found.copy()


Script: TypeAlias = Callable[[Cluster], Awaitable[None]]
_NO_RESULT = Result(error="RunError", message="all nodes have ended before the run")
