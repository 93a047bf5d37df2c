"""RunHandle: a run as its launcher sees it, through the store."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.leader.recovery_record import RecoveryRecord, decode_recoveries
from culm.cluster.run_setup import (
    HookValues,
    RunResult,
    RunSetup,
    decode_fleet_progress,
    decode_node_record,
    decode_result,
    encode,
)
from culm.errors import NodeLost, RunError
from culm.observe.slot_assignments import slot_assignments
from culm.observe.step_metrics import StepMetrics
from culm.plan.rent.fleet_decision import FleetProgress
from culm.providers.node_pool import NodePool
from culm.providers.run_events import (
    IncidentEvent,
    MachineEvent,
    NodeJoinedEvent,
    NodeLostEvent,
    NodePlacedEvent,
    RunEvent,
    ShapeEvent,
    StorageEvent,
)
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.schedule import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.cluster.store.store import Store
    from culm.market.rental_cost import RentalTerms
    from culm.plan.rent.fleet_decision import FleetDecision, FleetProgress
    from culm.providers.provider import Provider


_STEPS_KEPT = 2_000
"""Steps whose times are kept: the launcher of a long run must not grow with the number of its steps."""


class RunHandle:
    """State of a run, read from the store while `follow` runs, and the few keys that a launcher writes."""

    def __init__(self, setup: RunSetup, store: Store, provider: Provider, *, owns_all_nodes: bool = True) -> None:
        """`owns_all_nodes`: all nodes of the run are started by this launcher's provider."""
        self.setup, self.store, self.owns_all_nodes = setup, store, owns_all_nodes
        self.nodes = NodePool(self, provider)
        self.lost_nodes: list[int] = []
        """Nodes that were lost during the run, in order."""
        self.progress: FleetProgress | None = None
        """The newest progress that the leader has published for fleet controllers."""
        self._rental_of_node: dict[int, RentalTerms] = {}
        self.leader: int | None = None
        """The node of the current or last leader; None: there was no leader yet."""
        self.full_steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        """Durations in seconds of the last steps during which every slot was filled."""
        self.step_ends: deque[float] = deque(maxlen=_STEPS_KEPT)
        """When each of the last steps ended, in seconds."""
        self._last_t: float | None = None
        """When the last step of the current epoch ended."""
        self.samples_per_step = 0
        self._slots_filled = asyncio.Event()
        self.epoch: Epoch | None = None
        self._first_step_done = asyncio.Event()
        self._steps_done: int | None = None
        self._leader_known = asyncio.Event()
        self._present_nodes: set[int] = set()
        self._membership_changed = asyncio.Event()
        self._worker_exits: dict[int, str] = {}
        """How worker processes ended that were not killed, by node."""
        self._joined_nodes: set[int] = set()
        self._machine_of_node: dict[int, str] = {}
        self._advice_of_node: dict[int, str] = {}
        """Why a node should be replaced, as its cloud says."""
        self._nodes_up: set[int] = set()
        self._recoveries_seen = 0
        self._result: asyncio.Future[RunResult] = asyncio.get_running_loop().create_future()
        self._steps: asyncio.Queue[StepMetrics | None] = asyncio.Queue()
        self._nodes_up_queue: asyncio.Queue[int] = asyncio.Queue()
        self._events: asyncio.Queue[RunEvent] = asyncio.Queue()
        self._write_queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()

    async def follow(self) -> None:
        """Read and write the store until cancelled. A store that stays unreachable ends the run."""
        writing = asyncio.create_task(self._write_queued())
        try:
            async for key, value in self.store.watch(""):
                self._handle_change(key, value)
        except RunError as error:
            self._set_result(RunResult(error=RunError.__name__, message=str(error)))
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def _handle_change(self, key: str, value: bytes | None) -> None:
        kind, _, name = key.partition("/")
        if kind == "nodes":
            self._handle_node(int(name), value)
        elif value is None:
            return
        elif kind == "machine":
            self._machine_of_node[int(name)] = value.decode()
        elif kind == "advice":
            self._advice_of_node[int(name)] = value.decode()
        elif kind == "ended":
            self._worker_exits[int(name)] = value.decode()
        elif kind == "leader":
            self.leader = int(value)
            self._leader_known.set()
        elif kind == "step":
            self._handle_step(StepMetrics.from_fields(msgspec.msgpack.decode(value)))
        elif kind == "epoch":
            self._handle_epoch(messages.decode(value))
        elif kind == "history":
            self._handle_recoveries(decode_recoveries(value).recoveries)
        elif kind == "result":
            self._set_result(decode_result(value))
        else:
            self._handle_note(kind, value)

    def _handle_note(self, kind: str, value: bytes) -> None:
        """Handle what the leader says about the run besides its steps."""
        if kind == "progress":
            self.progress = decode_fleet_progress(value)
        elif kind == "shape":
            self._events.put_nowait(ShapeEvent(**msgspec.msgpack.decode(value)))
        elif kind == "storage":
            self._events.put_nowait(StorageEvent(msgspec.msgpack.decode(value)))
        elif kind == "incident":
            self._events.put_nowait(IncidentEvent(value.decode()))

    def _handle_node(self, node: int, value: bytes | None) -> None:
        self._joined_nodes.add(node)
        (self._present_nodes.discard if value is None else self._present_nodes.add)(node)
        self._membership_changed.set()
        if value is None and not self._result.done():
            self.lost_nodes.append(node)
            self._events.put_nowait(NodeLostEvent(node, self._worker_exits.get(node, "")))
        elif value is not None and decode_node_record(value).workers and node not in self._nodes_up:
            self._nodes_up.add(node)
            self._nodes_up_queue.put_nowait(node)
            if node >= self.setup.nodes or self.epoch is not None:
                self._events.put_nowait(NodeJoinedEvent(node, self._has_empty_slot()))

    def _has_empty_slot(self) -> bool:
        """Whether the epoch has an empty slot, or a member that is gone, whose slot will be empty."""
        members = () if self.epoch is None else self.epoch.present_members
        return not self._slots_filled.is_set() or any(member.node not in self._present_nodes for member in members)

    def _handle_epoch(self, epoch: messages.Message) -> None:
        assert isinstance(epoch, Epoch)
        before = {} if self.epoch is None else _layers_of_nodes(self.epoch)
        if self.epoch is not None:
            self._report_placed_nodes(epoch, before)
        self.epoch, self._last_t = epoch, None
        (self._slots_filled.set if _all_slots_filled(epoch) else self._slots_filled.clear)()

    def _report_placed_nodes(self, epoch: Epoch, before: Mapping[int, str]) -> None:
        """Report the nodes that have layers now and had none before."""
        slots: dict[int, list[str]] = {}
        for each in slot_assignments(epoch):
            if each.layers:
                slots.setdefault(each.node, []).append(each.slot)
        empty = epoch.members.count(None)
        for node, layers in _layers_of_nodes(epoch).items():
            if node not in before:
                self._events.put_nowait(NodePlacedEvent(node, " and ".join(slots[node]), layers, empty))

    def _handle_step(self, metrics: StepMetrics) -> None:
        self._first_step_done.set()
        self._steps_done = metrics.step + 1
        if self._slots_filled.is_set() and self._last_t is not None:
            self.full_steps_s.append(metrics.t - self._last_t)
        self.step_ends.append(metrics.t)
        self.samples_per_step, self._last_t = metrics.samples, metrics.t
        self._steps.put_nowait(metrics)

    def _handle_recoveries(self, recoveries: tuple[RecoveryRecord, ...]) -> None:
        for recovered in recoveries[self._recoveries_seen :]:
            self._events.put_nowait(recovered)
        self._recoveries_seen = max(self._recoveries_seen, len(recoveries))

    def _set_result(self, result: RunResult) -> None:
        if not self._result.done():
            self._result.set_result(result)
            self._steps.put_nowait(None)

    async def _write_queued(self) -> None:
        """Write queued keys in order. A result is written only if there is none."""
        while True:
            key, value = await self._write_queue.get()
            if key == "result":
                await self.store.swap(key, None, value)
            else:
                await self.store.put(key, value)

    async def wait_for_leader(self) -> int:
        """Wait until there is a leader; returns its node."""
        await self._leader_known.wait()
        assert self.leader is not None
        return self.leader

    @property
    def steps_done(self) -> int | None:
        """The number of steps after the newest commit; None: no step was committed since the launch."""
        return self._steps_done

    async def wait_for_first_step(self) -> None:
        """Wait for the first step to be committed."""
        await self._first_step_done.wait()

    async def wait_until_slots_filled(self) -> None:
        """Wait until every slot has a worker that runs its stage."""
        await self._slots_filled.wait()

    async def next_event(self) -> RunEvent:
        """The next event: a node joined, a node was lost, or the run recovered from a loss."""
        return await self._events.get()

    def pending_events(self) -> list[RunEvent]:
        """Events that `next_event` has not returned yet."""
        return [self._events.get_nowait() for _ in range(self._events.qsize())]

    async def next_step(self) -> StepMetrics | None:
        """The metrics of the next committed step; None when the run has ended."""
        found = await self._steps.get()
        if found is None:
            self._steps.put_nowait(None)
        return found

    def has_joined(self, node: int) -> bool:
        """Whether its agent has ever been in the store. From then on the leader notices its end."""
        return node in self._joined_nodes

    async def wait_until_nodes_left(self) -> None:
        """Wait until the run has ended and no node is left in the store."""
        await self.wait_for_result()
        while self._present_nodes:
            self._membership_changed.clear()
            await self._membership_changed.wait()

    @property
    def machines_in_run(self) -> dict[str, bool]:
        """The machines with a node in the run, by the id that their agents were started with, and whether the node has
        a slot."""
        members = {member.node for member in self.epoch.present_members} if self.epoch is not None else set()
        return {
            machine: node in members or self.epoch is None
            for node, machine in sorted(self._machine_of_node.items())
            if node in self._present_nodes
        }

    @property
    def advised_machines(self) -> dict[str, str]:
        """The machines in the run that should be replaced, as their cloud says, and why."""
        return {
            self._machine_of_node[node]: reason
            for node, reason in self._advice_of_node.items()
            if node in self._present_nodes and node in self._machine_of_node
        }

    async def next_node_up(self) -> int:
        """The number of the next node whose worker is up."""
        return await self._nodes_up_queue.get()

    def permit_steps_below(self, until: int) -> None:
        """With the gate `outside`: steps below this number may run."""
        self._write_queue.put_nowait(("gate/permit", str(until).encode()))

    def set_rental(self, machine: str, terms: RentalTerms) -> None:
        """Tell the leader what the node of a machine costs. Nothing happens if the machine has no node in the run, or
        if that was said already."""
        for node, known in self._machine_of_node.items():
            if known == machine and node in self._present_nodes and self._rental_of_node.get(node) != terms:
                self._rental_of_node[node] = terms
                self._write_queue.put_nowait((f"rentals/{node}", encode(terms)))

    def report_fleet(self, decision: FleetDecision) -> None:
        """Let the leader record how many nodes are wanted, and why; it stops the run if the decision says so."""
        self._write_queue.put_nowait(("wish/fleet", encode(decision)))

    def send_hook_values(self, step: int, values: dict[str, float]) -> None:
        """With the gate `caller`: the hook has returned for a step. The leader writes its line now."""
        self._write_queue.put_nowait(("gate/values", encode(HookValues(step, values))))

    def finish_before(self, step: int) -> None:
        """With the gate `outside`: end the run before a step; 0: before the next one."""
        self._write_queue.put_nowait(("gate/finish", str(step).encode()))

    def finish_at_next_step(self) -> None:
        """End the run before the first step that no worker has begun, with a checkpoint if it has a folder."""
        self.finish_before(0)

    def fail(self, message: str) -> None:
        """End the run from outside, unless it has ended."""
        self._write_queue.put_nowait(("result", encode(RunResult(error=RunError.__name__, message=message))))

    def abort(self, message: str) -> None:
        """End the run for this process alone, because its store is gone and no result can be read or written."""
        self._set_result(RunResult(error=RunError.__name__, message=message))

    def add_note(self, text: str) -> None:
        """Add an event of this machine, such as a restart of the private etcd."""
        self._events.put_nowait(MachineEvent(text))

    @property
    def has_ended(self) -> bool:
        return self._result.done()

    async def wait_for_result(self) -> RunResult:
        """Wait for the result of the run. If a worker ended by itself, the message of a failure names it."""
        result = await asyncio.shield(self._result)
        if (
            result.summary is not None
            or result.error not in (RunError.__name__, NodeLost.__name__)
            or not self._worker_exits
        ):
            return result
        node, how = next(iter(self._worker_exits.items()))
        return msgspec.structs.replace(result, message=f"{result.message}; the worker of node {node} had {how}")


def _layers_of_nodes(epoch: Epoch) -> dict[int, str]:
    """The layers that nodes run in an epoch, of the nodes that run any."""
    found: dict[int, list[str]] = {}
    for each in slot_assignments(epoch):
        if each.layers:
            found.setdefault(each.node, []).append(each.layers)
    return {node: " and ".join(layers) for node, layers in found.items()}


def _all_slots_filled(epoch: Epoch) -> bool:
    """Whether every slot has a worker that runs its stage."""
    plan = Plan.from_text(epoch.plan)
    return None not in epoch.members and all(plan.stages_of(slot) for slot in range(len(epoch.members)))
