"""Fault runner: injects a schedule of faults into one simulated cluster."""

from __future__ import annotations

import asyncio
import collections
import errno
import functools
import random
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple

import torch

from culm.cluster.node_faults import (
    ClusterFault,
    FailNode,
    JoinNodes,
    KillNode,
    NodeFault,
    NoticeToNode,
    PartitionNode,
    PauseNode,
)
from culm.errors import UsageError
from culm.runtime.clock import InjectedError
from culm.testing.fault_schedule import (
    Faults,
    FrameFlip,
    LayoutRequest,
    LinkFault,
    LoopBlock,
    MemoryFlip,
    MessageDelay,
    MessageDrop,
    MessageReorder,
    Outage,
    SlowDisk,
    SlowLink,
    SlowNode,
    StorageFault,
    StorageStall,
    StoreCutoff,
    StorePause,
)
from culm.testing.simulated_machines import node_of
from culm.transport.frames.simulated_network import Delivery, DeliveryTiming

if TYPE_CHECKING:
    from culm.testing.simulated_machines import SimulatedMachines

_STORAGE_ERRORS: dict[str, Callable[[], OSError]] = {
    "unavailable": lambda: OSError(errno.ESTALE, "Stale file handle"),
    "full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "busy": lambda: ConnectionError("503 Slow Down"),
}


class InjectedFault(NamedTuple):
    """A fault that was injected."""

    fault: ClusterFault
    at: str
    """The action that had just been done; empty: the moment was not an action."""


class FaultRunner:
    """Injects each fault once, when its moment comes, and decides how each message is delivered.

    Deterministic: randomness comes only from the seed.
    """

    def __init__(
        self,
        faults: Faults,
        machines: SimulatedMachines,
        *,
        nodes: int,
        add_node: Callable[[], object],
        give_notice: Callable[[int, float], None],
        request_layout: Callable[[str], None],
        flip_memory: Callable[[int], None],
        latency: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.faults, self.machines = faults, machines
        self._add_node, self._give_notice, self._request_layout = add_node, give_notice, request_layout
        self._flip_memory = flip_memory
        total_nodes = nodes + sum(fault.count for fault in faults.all if isinstance(fault, JoinNodes))
        for fault in faults.all:
            _check_node_numbers(fault, total_nodes)
        self.injected: list[InjectedFault] = []
        self._node_faults = [f for f in faults.all if isinstance(f, NodeFault) and not isinstance(f, FailNode)]
        self._errors = [fault for fault in faults.all if isinstance(fault, FailNode)]
        self._link_faults = [fault for fault in faults.all if isinstance(fault, LinkFault)]
        self._disk_delays = {fault.node: fault.seconds for fault in faults.all if isinstance(fault, SlowDisk)}
        self._storage_failures: list[tuple[float, str]] = []
        """(end, kind of error) of the storage failures so far."""
        self._storage_stalled_until = 0.0
        self._slow_nodes: list[tuple[float, SlowNode]] = []
        """(end, fault)."""
        self._match_counts: collections.Counter[int] = collections.Counter()
        self._default_delivery = DeliveryTiming(latency)
        self._dice = {i: random.Random(f"{seed} {fault}") for i, fault in enumerate(self._link_faults)}

    def start_timers(self) -> None:
        """Start the timers of faults with `after_s`, at the start of the run."""
        for fault in self._node_faults:
            if fault.after_s is not None:
                inject = functools.partial(self._inject, fault, "")
                asyncio.get_running_loop().call_later(fault.after_s, inject, context=Context())

    def on_action_done(self, node: int, step: int, action: str) -> bool:
        """A node has done an action and its output is not sent yet. Returns whether a fault was injected, into this
        node or another."""
        self.machines.history.on_action_done(node, step, action)
        due = [fault for i, fault in enumerate(self._node_faults) if self._is_due(i, fault, node, step, action)]
        for fault in due:
            self._inject(fault, action)
        return bool(due)

    def raise_due_error(self, node: int, step: int, action: str) -> None:
        """A node has computed an action and counted nothing yet. Raises the error of a fault that is due."""
        numbers = range(len(self._node_faults), len(self._node_faults) + len(self._errors))
        due = [f for i, f in zip(numbers, self._errors, strict=True) if self._is_due(i, f, node, step, action)]
        for fault in due:
            self._record(fault, action)
            if "out of memory" in fault.error:
                raise torch.OutOfMemoryError(fault.error)
            raise InjectedError(fault.error)

    def _is_due(self, number: int, fault: NodeFault, node: int, step: int, action: str) -> bool:
        if not fault.matches(node, step, action):
            return False
        self._match_counts[number] += 1
        return self._match_counts[number] == fault.nth

    def _inject(self, fault: NodeFault, action: str) -> None:  # noqa: PLR0912
        self._record(fault, action)
        match fault:
            case KillNode():
                self.machines.kill(fault.nodes, silence=fault.silence)
            case PauseNode():
                for node in fault.nodes:
                    self.machines.pause(node, fault.seconds)
            case LoopBlock():
                for node in fault.nodes:
                    self.machines.block(node, fault.seconds)
            case SlowNode():
                self._slow_nodes.append((_now() + fault.seconds, fault))
            case StorageFault():
                self._storage_failures.append((_now() + fault.seconds, fault.error))
            case StorageStall():
                self._storage_stalled_until = max(self._storage_stalled_until, _now() + fault.seconds)
            case JoinNodes():
                for _ in range(fault.count):
                    self._add_node()
            case NoticeToNode():
                for node in fault.nodes:
                    self._give_notice(node, fault.seconds)
            case MemoryFlip():
                for node in fault.nodes:
                    self._flip_memory(node)
            case LayoutRequest():
                self._request_layout(fault.layout)
            case Outage():
                self.machines.start_store_outage(fault.seconds)
            case StorePause():
                expired = (fault.expired,) if isinstance(fault.expired, int) else fault.expired
                self.machines.pause_store(fault.seconds, expired)
            case StoreCutoff():
                self.machines.cut_off_from_store(frozenset(fault.nodes), fault.seconds)
            case PartitionNode():
                self.machines.partition(frozenset(fault.nodes), fault.seconds)

    def _record(self, fault: ClusterFault, action: str = "") -> None:
        if all(injected.fault != fault for injected in self.injected):
            self.injected.append(InjectedFault(fault, action))
            self.machines.history.add(None, f"the moment of {fault}")

    def disk_delay_s(self, node: int | None) -> float:
        """How long a call to the outside, such as a disk write, takes on a node."""
        seconds = self._disk_delays.get(node, 0.0) if node is not None else 0.0
        if seconds and node is not None:
            self._record(SlowDisk(node=node, seconds=seconds))
        return max(seconds, self._storage_stalled_until - _now())

    def check_storage_access(self, verb: str) -> None:
        """Before each access to storage: raise the error of a failure that has not ended. "write" fails in any."""
        for end, kind in self._storage_failures:
            if _now() < end and (kind != "full" or verb == "write"):
                raise _STORAGE_ERRORS[kind]()

    def slowdown_of(self, node: int) -> float:
        """How many times as long as usual an action of a node takes."""
        slow = [fault.factor for end, fault in self._slow_nodes if node in fault.nodes and _now() < end]
        return max(slow, default=1.0)

    @property
    def flips_frames(self) -> bool:
        """Whether any fault damages frames."""
        return any(isinstance(fault, FrameFlip) for fault in self._link_faults)

    def flips_frame(self, delivery: Delivery) -> bool:
        """Whether a bit of this frame flips on its way. Frames within a node are never damaged."""
        source, target = node_of(delivery.source), node_of(delivery.target)
        due = [
            self._is_nth(-1 - number, fault, fault.nth)
            for number, fault in enumerate(self._link_faults)
            if isinstance(fault, FrameFlip) and source != target and fault.affects(source, target)
        ]
        return any(due)

    def delivery_of(self, delivery: Delivery) -> DeliveryTiming | None:
        """How a message is delivered; None: it is lost. Messages within a node are never affected."""
        if not self._link_faults and not self.machines.has_partition:
            return self._default_delivery
        source, target = node_of(delivery.source), node_of(delivery.target)
        if source == target:
            return self._default_delivery
        if not self.machines.connected(source, target):
            return None
        timing: DeliveryTiming | None = self._default_delivery
        for number, fault in enumerate(self._link_faults):
            if timing is not None and fault.affects(source, target):
                timing = self._apply_link_fault(number, fault, delivery, timing)
        return timing

    def _apply_link_fault(
        self, number: int, fault: LinkFault, delivery: Delivery, timing: DeliveryTiming
    ) -> DeliveryTiming | None:
        """The delivery after the effect of one link fault; None: the message is lost."""
        match fault:
            case MessageDrop() if delivery.kind in ((fault.kind,) if fault.kind else ("frame", "message")):
                return None if self._is_nth(-1 - number, fault, fault.nth) else timing
            case MessageDelay() if delivery.kind in ("frame", "message"):
                if self._is_nth(-1 - number, fault, fault.nth):
                    return timing._replace(seconds=timing.seconds + fault.seconds)
            case SlowLink():
                self._record(fault)
                more = fault.latency + fault.seconds_per_byte * delivery.size
                return timing._replace(seconds=timing.seconds + more)
            case MessageReorder():
                self._record(fault)
                more = self._dice[number].uniform(0.0, fault.seconds)
                return DeliveryTiming(timing.seconds + more, timing.in_order and delivery.kind != "frame")
        return timing

    def _is_nth(self, number: int, fault: ClusterFault, nth: int | None) -> bool:
        """Whether this message is the nth one that the fault concerns; `nth` None: every one."""
        self._match_counts[number] += 1
        hit = nth is None or self._match_counts[number] == nth
        if hit:
            self._record(fault)
        return hit


def _check_node_numbers(fault: ClusterFault, nodes: int) -> None:
    named = fault.nodes if isinstance(fault, NodeFault) else ()
    if isinstance(fault, LinkFault):
        named = tuple(node for node in (fault.source, fault.target) if node is not None)
    if isinstance(fault, SlowDisk):
        named = (fault.node,)
    for node in named:
        if not 0 <= node < nodes:
            raise UsageError(f"{fault}: there is no node {node}: the last one is {nodes - 1}")


def _now() -> float:
    return asyncio.get_running_loop().time()
