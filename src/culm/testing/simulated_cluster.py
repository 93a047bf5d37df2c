"""Simulated cluster: production's agents, leader and workers in one process, with a simulated clock, network and
store."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import torch

from culm.cluster.agent.agent import Agent
from culm.cluster.agent.preemption_notice import PreemptionNotice
from culm.cluster.prepare_run import prepare_run
from culm.cluster.run_setup import RunResult, RunSetup, decode_result, encode
from culm.cluster.store.store import MemoryStore
from culm.config import RunConfig
from culm.device.device_copies import open_device
from culm.device.simulated_streams import SimulatedDevice
from culm.errors import DeviceFailed
from culm.job import Job
from culm.market.rental_cost import RentalTerms, rental_terms
from culm.runtime.compute.snapshot import Snapshot
from culm.runtime.worker import Worker
from culm.storage_access import check_access
from culm.testing.fault_runner import FaultRunner, InjectedFault
from culm.testing.fault_schedule import Faults
from culm.testing.run_history import RunHistory
from culm.testing.simulated_machines import SimulatedMachines
from culm.testing.virtual_time import VirtualClock, infrequent_gc, run_virtual, virtual_loop
from culm.transport.frames.frame_codec import tensor_bytes
from culm.transport.frames.simulated_network import SimulatedNetwork

_OPEN_REAL_DEVICE = functools.partial(open_device, in_virtual_time=True)
NO_FAULTS = Faults()
LEASE_S = 2.0
"""Seconds after which a silent node counts as lost: the shortest lease that etcd grants."""


@dataclass
class SimulatedRun:
    """The result of a simulated run: its summary, the losses by step, and the final state."""

    summary: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    snapshot: Snapshot = field(default_factory=Snapshot)
    virtual_s: float = 0.0
    history: RunHistory = field(default_factory=RunHistory)
    injected_faults: tuple[InjectedFault, ...] = ()
    """The faults that were injected, each with its moment."""
    reported_losses: tuple[tuple[int, float | None], ...] = ()
    """(step, loss) as written to the store. A step that was run again appears twice; a step that was committed during a
    store outage does not appear."""

    def faults_not_reached(self, faults: Faults) -> list[str]:
        """The faults of a schedule whose moment never came."""
        injected = [entry.fault for entry in self.injected_faults]
        return [str(fault) for fault in faults.all if fault not in injected]

    @property
    def evaluations(self) -> dict[int, float]:
        """The loss of each evaluation, by the step after which it was run."""
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
    device: SimulatedDevice | None = None,
    rental: NodeRental | None = None,
    first_nodes: int | None = None,
    **request: Any,
) -> SimulatedRun:
    """Train a job on a simulated cluster; `request` takes the arguments of `culm.train`.

    Raises what a real run would raise, or Deadlock where a real run would hang; the error has the history of the run as
    a note.

    `faults` is the schedule of faults, and `seed` decides what is random about them. `cost` returns the virtual seconds
    of an action, given node, step and action; `latency` is the delay of every message in seconds; `lease_s` is the time
    after which a silent node counts as lost. `script` is a coroutine that runs beside the cluster and may inject
    faults: see `Cluster.kill`. Nodes are in the `zones` in turn. `rental` returns what a node costs, given its number;
    default: as the config says. `first_nodes`: how many nodes join at once, the others when the script adds them;
    default: all. `device`: workers compute on simulated devices, which complete their work later.
    """
    config = RunConfig(**request)
    setup = prepare_run(job, config, measure=False)
    terms = rental_terms(instance=config.instance, market=config.market, usd_h=config.node_price)
    options: dict[str, Any] = {"cost": cost, "latency": latency, "lease_s": lease_s, "script": script, "zones": zones}
    options |= {"first_nodes": first_nodes, "device": device, "rental": rental or (lambda _: terms)}
    return run_prepared(job, setup, faults=faults, seed=seed, **options)


@infrequent_gc()
def run_prepared(
    job: Job,
    setup: RunSetup,
    *,
    faults: Faults = NO_FAULTS,
    seed: int = 0,
    cost: Callable[[int, int, str], float] | None = None,
    latency: float = 0.0,
    lease_s: float = LEASE_S,
    script: Script | None = None,
    zones: Sequence[str] = (),
    device: SimulatedDevice | None = None,
    rental: NodeRental = lambda _: None,
    first_nodes: int | None = None,
) -> SimulatedRun:
    """Like `simulate`, for a setup that is already prepared: for many runs of one setup."""
    interfaces = (VirtualClock(cost), SimulatedNetwork(latency))
    options: dict[str, Any] = {"faults": faults, "seed": seed, "lease_s": lease_s, "zones": zones}
    cluster = Cluster(job, setup, *interfaces, **options, device=device, rental=rental, first_nodes=first_nodes)
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        return run_virtual(cluster.run(script))
    except Exception as error:
        error.add_note(f"{faults}, seed {seed}:\n{cluster.history}")
        raise
    finally:
        torch.set_num_threads(before)


class _SimulatedNotice:
    """The source of preemption notices of a simulated node."""

    def __init__(self) -> None:
        self._notice: asyncio.Future[PreemptionNotice] = asyncio.get_running_loop().create_future()

    def set(self, seconds: float) -> None:
        if not self._notice.done():
            self._notice.set_result(PreemptionNotice(seconds, "simulated"))

    async def wait(self) -> PreemptionNotice:
        return await asyncio.shield(self._notice)


class Cluster:
    """The nodes of one run, in this process and in virtual time."""

    def __init__(
        self,
        job: Job,
        setup: RunSetup,
        clock: VirtualClock,
        network: SimulatedNetwork,
        *,
        faults: Faults = NO_FAULTS,
        seed: int = 0,
        lease_s: float = LEASE_S,
        zones: Sequence[str] = (),
        device: SimulatedDevice | None = None,
        rental: NodeRental = lambda _: None,
        first_nodes: int | None = None,
    ) -> None:
        """`first_nodes`: how many nodes join at once; None: all. `device`: the simulated device of each worker;
        None: workers compute on the CPU."""
        self._device, self._rental = device, rental
        self._first_nodes = setup.nodes if first_nodes is None else first_nodes
        self._zones = tuple(zones) or ("",)
        self.job, self.setup, self.clock, self.network = job, setup, clock, network
        self.store = MemoryStore()
        self.store.write("setup", encode(setup))
        self.workers: dict[int, Worker] = {}
        self._nodes: dict[int, asyncio.Task[None]] = {}
        self._notices: dict[int, _SimulatedNotice] = {}
        self.history = RunHistory()
        self.machines = SimulatedMachines(network, self.store, self.history, lease_s, setup.blocked_after)
        self.fault_runner = FaultRunner(
            faults,
            self.machines,
            nodes=setup.nodes,
            add_node=self.add_node,
            give_notice=self.give_notice,
            request_layout=self.request_layout,
            flip_memory=self.flip_memory,
            latency=network.latency,
            seed=seed,
        )
        clock.fault_hook, network.delivery_rule = self.fault_runner, self.fault_runner.delivery_of
        if self.fault_runner.flips_frames:
            network.damages_frame = self.fault_runner.flips_frame

    async def run(self, script: Script | None = None) -> SimulatedRun:
        """Run from the first node to the result. Nothing of the run is left running afterwards."""
        check_access.set(self.fault_runner.check_storage_access)  # for this task and those it starts
        steps = self.store.subscribe("step")
        result_at: list[float] = []
        self.store.listen("", self.history.on_store_change)
        self.store.listen("result", lambda _: result_at.append(self.clock.now()))
        for _ in range(self._first_nodes):
            self.add_node()
        self.fault_runner.start_timers()
        virtual_loop().explain_deadlocks(self.describe_waits)
        script_tasks = [asyncio.ensure_future(script(self))] if script is not None else []
        running = asyncio.ensure_future(self._wait_for_all_nodes())
        both: list[asyncio.Future[Any]] = [running, *script_tasks]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            for ended in (task for task in script_tasks if task.done()):
                ended.result()
            await running
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            await self._end_nodes()
        result = decode_result(self.store.read("result") or encode(_NO_RESULT))
        if result.summary is None:
            raise result.to_error()
        reports = [msgspec.msgpack.decode(steps.get_nowait().value or b"") for _ in range(steps.qsize())]
        reported = tuple((step["step"], step["loss"]) for step in reports)
        losses = [loss for _, loss in reported]
        injected = tuple(self.fault_runner.injected)
        return SimulatedRun(result.summary, losses, self._snapshot(), result_at[0], self.history, injected, reported)

    def add_node(self) -> int:
        """Add a node with the next number; it joins the run if a slot is free. Returns the number."""
        number = len(self._nodes)
        self._notices[number] = _SimulatedNotice()
        self._nodes[number] = virtual_loop().create_node_task(number, self._run_node(number))
        return number

    async def _wait_for_all_nodes(self) -> None:
        """Wait until no node runs any more, including nodes that are added meanwhile. Raises what a node raised."""
        while running := [task for task in self._nodes.values() if not task.done()]:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _end_nodes(self) -> None:
        for task in self._nodes.values():
            task.cancel()
        await asyncio.gather(*self._nodes.values(), return_exceptions=True)

    def kill(self, node: int) -> None:
        """Kill a node without notice: it does nothing any more, and every connection to it breaks."""
        self.machines.kill([node])

    def give_notice(self, node: int, seconds: float) -> None:
        """Give a node a preemption notice: it vanishes after `seconds` unless it has left before. Ignored for a node
        that does not exist yet."""
        if node not in self._nodes:
            return
        self.history.add(node, f"has {seconds:g} s of notice")
        self._notices[node].set(seconds)

        def vanish() -> None:
            if not self._nodes[node].done() and node not in self.machines.lost_nodes:
                self.kill(node)

        asyncio.get_running_loop().call_later(seconds, vanish, context=Context())

    def change_price(self, node: int, usd_h: float) -> None:
        """A node has another price from now on, as the program that rents it reports."""
        self.store.write(f"prices/{node}", repr(usd_h).encode())

    def flip_memory(self, node: int) -> None:
        """Flip a bit in the first weight that a node holds; nothing if it holds none yet."""
        worker = self.workers.get(node)
        for replica in worker.state.replicas.values() if worker is not None and worker.state is not None else ():
            for parameter in replica.state.parameters().values():
                data = tensor_bytes(parameter.detach())
                data[-2] ^= 1
                return

    def request_layout(self, layout: str) -> None:
        """Request another layout of the pipelines, as a user would."""
        self.store.write("wish/layout", layout.encode())

    def describe_waits(self) -> str:
        """What every endpoint waits for, and where the code of each node is, one line each."""
        nodes = (n for n in self._nodes if n not in self.machines.lost_nodes)
        places = (f"node {n} is at {', '.join(filter(None, virtual_loop().coroutine_positions(n)))}" for n in nodes)
        return "".join(f"\n    {line}" for line in (*self.network.describe_waits(), *places))

    async def wait_until_committed(self, step: int) -> None:
        """Wait until a step is committed."""
        steps = self.store.subscribe("step")
        while msgspec.msgpack.decode((await steps.get()).value or b"")["step"] < step:
            pass

    async def _run_node(self, number: int) -> None:
        """Run a node: an agent, which starts its workers."""

        K = self.setup.workers_per_node
        incarnations = [itertools.count() for _ in range(K)]

        async def start_worker(agent: str, index: int) -> str | None:
            incarnation, name = next(incarnations[index]), "worker" if K == 1 else f"worker{index}"
            endpoint = self.network.endpoint(f"{name}.{incarnation}-{number}" if incarnation else f"{name}-{number}")
            worker = Worker(
                self.job,
                number * K + index,
                agent,
                endpoint,
                self.clock,
                workers_per_node=K,
                open_device=_OPEN_REAL_DEVICE if self._device is None else self._device.open_for(number * K + index),
            )
            self.workers[worker.worker] = worker
            try:
                await worker.run()
            except DeviceFailed as error:
                self.history.add(number, str(error))
                return str(error)
            finally:
                await endpoint.close()
            return None

        endpoint = self.network.endpoint(f"agent-{number}")
        client = self.machines.open_session(number)
        try:
            interfaces = (endpoint, self.clock, client)
            zone = self._zones[number % len(self._zones)]
            notice = self._notices[number]
            await Agent(
                self.job,
                number,
                "simulated",
                *interfaces,
                start_worker,
                notice,
                zone=zone,
                rental=self._rental(number),
                reopen_store=functools.partial(self.machines.reopen_session, number),
                refuses_connection=self._has_ended,
                workers_per_node=K,
                simulated=True,
            ).run()
        except asyncio.CancelledError:
            if number not in self.machines.lost_nodes:
                raise
        finally:
            self.machines.end_session(number)
            await endpoint.close()

    async def _has_ended(self, address: str) -> bool:
        """Whether nothing listens at an address any more."""
        return address not in self.network.endpoints

    def _snapshot(self) -> Snapshot:
        """The model, each layer from a holder that has made every step."""
        snapshot = Snapshot()
        alive = [worker for worker in self.workers.values() if worker.node not in self.machines.lost_nodes]
        held = [replica for worker in alive if worker.state is not None for replica in worker.state.replicas.values()]
        for replica in sorted(held, key=lambda replica: replica.version):  # an unfinished copy may be behind
            snapshot.update(replica.state.snapshot())
        return snapshot.copy()


NodeRental: TypeAlias = Callable[[int], RentalTerms | None]
"""What a node costs, given its number."""
Script: TypeAlias = Callable[[Cluster], Awaitable[None]]
_NO_RESULT = RunResult(error="RunError", message="all nodes have ended before the run")
