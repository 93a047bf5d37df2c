"""`--on trace`: the machines of another provider, as available as a recorded market trace says.

A machine is there while a node of the trace is: when the trace removes that node, the machine gets its notice, if one
is configured, and is ended. A request gets as many machines as the trace has nodes that are not in use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar, NamedTuple

import msgspec

from culm.errors import UsageError
from culm.machines.machine_provider import (
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineProvider,
    MachineRequest,
    ProviderSettings,
)
from culm.market import MarketTrace, read_trace

_POLL_S = 0.1


class TraceNode(NamedTuple):
    """A node of the trace that is there at a moment."""

    number: int
    """Position of its arrival among the events: a node that comes again is another one."""
    zone: str
    leaves_at: float | None
    """Seconds since the start of the trace; None: it stays to the end."""


class TraceMachines:
    """Machines of another provider behind a market trace."""

    name: ClassVar[str] = "trace"
    options: ClassVar[Mapping[str, str]] = {
        "trace": "the trace file",
        "over": "provider of the machines (local)",
        "speedup": "how much faster than recorded the trace is replayed (1)",
        "start": "hours of the trace that are skipped (0)",
        "notice": "seconds of notice before a machine is taken away (0: none)",
    }
    costs_money: ClassVar[bool] = False

    def __init__(self, settings: ProviderSettings) -> None:
        from culm.machines.machine_provider_registry import open_machine_provider

        given = settings.options
        if "trace" not in given:
            raise UsageError("--option trace is missing: name a market trace, as in --option trace=market.csv")
        self._trace = read_trace(given["trace"])
        self._speedup = _number("speedup", given.get("speedup", "1"), above_zero=True)
        self._start_s = _number("start", given.get("start", "0")) * 3600.0
        self._notice_s = _number("notice", given.get("notice", "0"))
        self._inner: MachineProvider = open_machine_provider(
            given.get("over", "local"), ProviderSettings(launch=settings.launch, folder=settings.folder)
        )
        self._began: float | None = None
        """When the first machine was requested."""
        self._node_of: dict[str, TraceNode] = {}
        self._taken: dict[str, str] = {}
        """Machines that the trace has taken away, and why."""

    def check(self, request: MachineRequest) -> None:
        self._inner.check(msgspec.structs.replace(request, zone=""))

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        times = f"{self._speedup:g} times as fast as recorded"
        head = f"# availability of {self._trace.source}, {times}, over {self._inner.name}\n"
        return head + self._inner.manifest(spec, request)

    @property
    def _now_s(self) -> float:
        """Seconds since the start of the trace."""
        elapsed = 0.0 if self._began is None else time.monotonic() - self._began
        return self._start_s + elapsed * self._speedup

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        self._began = time.monotonic() if self._began is None else self._began
        used = {node.number for node in self._node_of.values()}
        free = [
            node
            for node in present_nodes(self._trace, self._now_s)
            if node.number not in used and request.zone in ("", node.zone)
        ][: request.count]
        started = []
        for node in free:
            zoned = msgspec.structs.replace(request, count=1, zone=node.zone)
            for id_ in await self._inner.request(spec, zoned):
                self._node_of[id_] = node
                started.append(id_)
        return started

    async def machines(self) -> list[Machine]:
        return [
            msgspec.structs.replace(
                machine,
                zone=self._node_of[machine.id].zone if machine.id in self._node_of else machine.zone,
                reason=self._taken.get(machine.id, machine.reason),
                failed=machine.failed and machine.id not in self._taken,
            )
            for machine in await self._inner.machines()
        ]

    async def drain(self, ids: list[str], notice_s: float) -> None:
        await self._inner.drain(ids, notice_s)

    async def release(self, ids: list[str]) -> None:
        await self._inner.release(ids)

    async def notices(self) -> AsyncIterator[MachineNotice]:
        """Also ends machines at the times of the trace."""
        warned: set[str] = set()
        while True:
            await asyncio.sleep(_POLL_S)
            for id_, node in list(self._node_of.items()):
                if node.leaves_at is None or id_ in self._taken:
                    continue
                left_s = (node.leaves_at - self._now_s) / self._speedup
                if left_s <= 0:
                    self._taken[id_] = "the market trace has taken it away"
                    await self._inner.release([id_])
                elif left_s <= self._notice_s and id_ not in warned:
                    warned.add(id_)
                    yield MachineNotice(id_, left_s, "the market trace will take it away")

    def price(self, request: MachineRequest) -> float | None:
        return self._inner.price(request)

    async def down(self) -> None:
        await self._inner.down()


def present_nodes(trace: MarketTrace, t: float) -> list[TraceNode]:
    """The nodes that are there at a moment of the trace, the oldest first."""
    there: dict[str, tuple[int, str]] = {}
    later: dict[str, float] = {}
    for number, event in enumerate(trace.events):
        if event.t <= t:
            if event.kind == "add":
                there[event.node] = (number, event.zone)
            else:
                there.pop(event.node, None)
        elif event.kind == "remove":
            later.setdefault(event.node, event.t)
    return [TraceNode(number, zone, later.get(node)) for node, (number, zone) in there.items()]


def _number(name: str, text: str, *, above_zero: bool = False) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if found < 0 or (above_zero and found == 0):
        raise UsageError(f"--option {name} is {text!r}: use a number {'above 0' if above_zero else 'of at least 0'}")
    return found
