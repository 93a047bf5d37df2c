"""A schedule of faults at work on one simulated cluster."""

from __future__ import annotations

import asyncio
import collections
import functools
import random
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple

from culm.cluster.blows import Blow, Fault, Join, Kill, Partition, Pause, Warn
from culm.errors import UsageError
from culm.testing.faults import Faults, Late, LinkFault, Lose, Outage, Reorder, SlowDisk, SlowLink, Wish
from culm.testing.machines import node_of
from culm.transport.memory import Parcel, Passage

if TYPE_CHECKING:
    from culm.testing.machines import Machines


class Strike(NamedTuple):
    """A fault whose moment has come."""

    fault: Fault
    at: str
    """The action that was done then; empty: it was no action."""


class Fate:
    """Strikes when the moment of a fault has come, once, and says how each parcel travels. Deterministic: what is
    random comes from the seed and from nothing else."""

    def __init__(
        self,
        faults: Faults,
        machines: Machines,
        *,
        nodes: int,
        add: Callable[[], object],
        warn: Callable[[int, float], None],
        wish: Callable[[str], None],
        latency: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.faults, self.machines = faults, machines
        self._add, self._warn, self._wish = add, warn, wish
        ever = nodes + sum(fault.count for fault in faults.all if isinstance(fault, Join))
        for fault in faults.all:
            _check_nodes(fault, ever)
        self.strikes: list[Strike] = []
        self._blows = [fault for fault in faults.all if isinstance(fault, Blow)]
        self._links = [fault for fault in faults.all if isinstance(fault, LinkFault)]
        self._disks = {fault.node: fault.seconds for fault in faults.all if isinstance(fault, SlowDisk)}
        self._times: collections.Counter[int] = collections.Counter()
        self._usual = Passage(latency)
        self._dice = {i: random.Random(f"{seed} {fault}") for i, fault in enumerate(self._links)}

    def begin(self) -> None:
        """The run starts: faults that strike after a while are set."""
        for blow in self._blows:
            if blow.after_s is not None:
                strike = functools.partial(self._strike, blow, "")
                asyncio.get_running_loop().call_later(blow.after_s, strike, context=Context())

    def reached(self, node: int, step: int, action: str) -> bool:
        """A node has done an action and nobody knows of it yet. Whether something strikes now, that node or another."""
        self.machines.history.reached(node, step, action)
        due = [blow for i, blow in enumerate(self._blows) if self._due(i, blow, node, step, action)]
        for blow in due:
            self._strike(blow, action)
        return bool(due)

    def _due(self, number: int, blow: Blow, node: int, step: int, action: str) -> bool:
        if not blow.matches(node, step, action):
            return False
        self._times[number] += 1
        return self._times[number] == blow.nth

    def _strike(self, blow: Blow, action: str) -> None:
        self._mark(blow, action)
        match blow:
            case Kill():
                self.machines.kill(blow.nodes, silence=blow.silence)
            case Pause():
                for node in blow.nodes:
                    self.machines.pause(node, blow.seconds)
            case Join():
                for _ in range(blow.count):
                    self._add()
            case Warn():
                for node in blow.nodes:
                    self._warn(node, blow.seconds)
            case Wish():
                self._wish(blow.layout)
            case Outage():
                self.machines.lose_store(blow.seconds)
            case Partition():
                self.machines.cut_off(frozenset(blow.nodes), blow.seconds)

    def _mark(self, fault: Fault, action: str = "") -> None:
        if all(strike.fault != fault for strike in self.strikes):
            self.strikes.append(Strike(fault, action))
            self.machines.history.note(None, f"the moment of {fault}")

    def disk_s(self, node: int | None) -> float:
        """How long a call of the outside takes on a node."""
        seconds = self._disks.get(node, 0.0) if node is not None else 0.0
        if seconds and node is not None:
            self._mark(SlowDisk(node=node, seconds=seconds))
        return seconds

    def way(self, parcel: Parcel) -> Passage | None:
        """How a parcel travels. What stays on a node is never touched."""
        if not self._links and not self.machines.cut:
            return self._usual
        source, target = node_of(parcel.source), node_of(parcel.target)
        if source == target:
            return self._usual
        if not self.machines.hears(source, target):
            return None
        passage: Passage | None = self._usual
        for number, fault in enumerate(self._links):
            if passage is not None and fault.concerns(source, target):
                passage = self._hindered(number, fault, parcel, passage)
        return passage

    def _hindered(self, number: int, fault: LinkFault, parcel: Parcel, passage: Passage) -> Passage | None:
        """What a fault of its link makes of a passage."""
        match fault:
            case Lose() if parcel.kind in ((fault.kind,) if fault.kind else ("frame", "letter")):
                return None if self._turn(-1 - number, fault, fault.nth) else passage
            case Late() if parcel.kind in ("frame", "letter"):
                if self._turn(-1 - number, fault, fault.nth):
                    return passage._replace(seconds=passage.seconds + fault.seconds)
            case SlowLink():
                self._mark(fault)
                more = fault.latency + fault.seconds_per_byte * parcel.size
                return passage._replace(seconds=passage.seconds + more)
            case Reorder():
                self._mark(fault)
                more = self._dice[number].uniform(0.0, fault.seconds)
                return Passage(passage.seconds + more, passage.in_order and parcel.kind != "frame")
        return passage

    def _turn(self, number: int, fault: Fault, nth: int | None) -> bool:
        """Whether it is the turn of this parcel: the nth one that the fault concerns; None: of each."""
        self._times[number] += 1
        hit = nth is None or self._times[number] == nth
        if hit:
            self._mark(fault)
        return hit


def _check_nodes(fault: Fault, nodes: int) -> None:
    named = fault.nodes if isinstance(fault, Blow) else ()
    if isinstance(fault, LinkFault):
        named = tuple(node for node in (fault.source, fault.target) if node is not None)
    if isinstance(fault, SlowDisk):
        named = (fault.node,)
    for node in named:
        if not 0 <= node < nodes:
            raise UsageError(f"{fault}: there is no node {node}: the last one is {nodes - 1}")
