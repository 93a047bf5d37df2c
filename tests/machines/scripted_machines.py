"""A provider for tests, as a user would write one: its machines do what a test says."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar

import msgspec

from culm.errors import RunError
from culm.machines.machine_provider import (
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    ProviderSettings,
    no_notices,
)


class ScriptedMachines:
    """Machines in memory."""

    name: ClassVar[str] = "scripted"
    options: ClassVar[Mapping[str, str]] = {}
    costs_money: ClassVar[bool] = True
    failing_downs: ClassVar[int] = 0
    """How often `down` fails before it works."""
    downs: ClassVar[int] = 0

    def __init__(self, settings: ProviderSettings) -> None:
        self.launch = settings.launch
        self.all: dict[str, Machine] = {}
        self.capacity = 1000
        self.outage = ""
        self._numbers = itertools.count(1)

    def check(self, request: MachineRequest) -> None:
        """Everything is there."""

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        return f"{request.count} machines: {spec.agent_command_line(request)}\n"

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        del spec
        if self.outage:
            raise RunError(self.outage)
        there = sum(machine.state != "ended" for machine in self.all.values())
        ids = [f"m{next(self._numbers)}" for _ in range(min(request.count, self.capacity - there))]
        self.all.update({id_: Machine(id=id_, state="running", market=request.market) for id_ in ids})
        return ids

    def end(self, id_: str, reason: str = "taken") -> None:
        """The market takes a machine."""
        self.all[id_] = msgspec.structs.replace(self.all[id_], state="ended", reason=reason)

    async def machines(self) -> list[Machine]:
        if self.outage:
            raise RunError(self.outage)
        return list(self.all.values())

    async def drain(self, ids: list[str], notice_s: float) -> None:
        """Nothing has to be handed over."""

    async def release(self, ids: list[str]) -> None:
        for id_ in ids:
            self.end(id_, "released")

    def notices(self) -> AsyncIterator[MachineNotice]:
        return no_notices()

    def price(self, request: MachineRequest) -> float | None:
        return 1.0 if request.market == "spot" else 3.0

    async def down(self) -> None:
        type(self).downs += 1
        if self.downs <= self.failing_downs:
            raise RunError("the engine does not answer")
        self.all.clear()
