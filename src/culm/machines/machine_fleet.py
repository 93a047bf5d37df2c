"""MachineFleet: executes the decisions of the FleetController at a provider, while a run needs machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from culm.errors import RunError, UsageError
from culm.machines.fleet_controller import (
    DrainMachines,
    FleetAction,
    FleetController,
    GiveUp,
    ReleaseMachines,
    Report,
    RequestMachines,
)
from culm.text_format import count_noun

if TYPE_CHECKING:
    from culm.machines.machine_provider import LaunchSpec, Machine, MachineProvider
    from culm.runtime.clock import Clock

_POLL_S = 1.0
_MAX_POLL_S = 15.0
"""Time between two looks at the machines: short while something is missing or has just changed, else up to this."""
_PRICE_S = 300.0
"""Time between two looks at the prices."""
_REMIND_S = 30.0
"""Time between two sentences about what is waited for."""
_TEARDOWN_ATTEMPTS = 3
_TEARDOWN_RETRY_S = 2.0


class MachineFleet:
    """Keeps the machines of one run."""

    def __init__(
        self,
        provider: MachineProvider,
        spec: LaunchSpec,
        controller: FleetController,
        clock: Clock,
        *,
        in_run: Callable[[], Mapping[str, bool]],
        advised: Callable[[], Mapping[str, str]] = dict,
        on_machines: Callable[[Iterable[Machine]], None] = lambda _: None,
        on_line: Callable[[str], None],
        on_give_up: Callable[[str], None],
    ) -> None:
        """`in_run` and `advised`: see RunHandle.machines_in_run and advised_machines. `on_machines` is called with what
        the provider lists, `on_line` with sentences, `on_give_up` with the reason why the run cannot get machines."""
        self._provider, self._spec, self.controller, self._clock = provider, spec, controller, clock
        self._on_machines, self._advised = on_machines, advised
        self._in_run, self._on_line, self._on_give_up = in_run, on_line, on_give_up
        self._waits_since: float | None = None
        self._reminded_at = 0.0
        self._outage = ""

    async def keep(self) -> None:
        """Request, replace and release machines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_notices())
            tasks.create_task(self._follow_prices())
            await self._follow_machines()

    async def _follow_machines(self) -> None:
        poll_s = _POLL_S
        while True:
            acted = await self.look_once()
            settled = not acted and self._waits_since is None
            poll_s = min(_MAX_POLL_S, poll_s * 1.5) if settled else _POLL_S
            await self._wait(poll_s)

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until a machine has left the run."""
        there, until = self._in_run().keys(), self._clock.now() + seconds
        while (left_s := until - self._clock.now()) > 0 and self._in_run().keys() >= there:
            await self._clock.sleep(min(_POLL_S, left_s))

    async def look_once(self) -> bool:
        """Look at the machines once and act. Returns whether something was done."""
        try:
            machines = await self._provider.machines()
        except RunError as error:
            if str(error) != self._outage:
                self._outage = str(error)
                self._on_line(f"the machines cannot be listed, and nothing is changed: {error}")
            return False
        self._outage = ""
        self._on_machines(machines)
        in_run = self._in_run()
        actions = self.controller.handle_advice(self._advised())
        actions += self.controller.decide(machines, in_run, self._clock.now())
        self._remind(machines, in_run)
        await self._execute(actions)
        return bool(actions)

    async def _execute(self, actions: Iterable[FleetAction]) -> None:
        for action in actions:
            match action:
                case RequestMachines(request, reason):
                    market = request.market if self._provider.costs_money else ""
                    kind = " ".join(word for word in (market, request.instance, request.zone) if word)
                    machines = count_noun(request.count, "machine") + (f" ({kind})" if kind else "")
                    self._on_line(f"requesting {machines}: {reason}")
                    await self._request(action)
                case ReleaseMachines(ids, reason):
                    self._on_line(f"releasing {', '.join(ids)}: {reason}")
                    with self._reported("the machines cannot be released"):
                        await self._provider.release(list(ids))
                case DrainMachines(ids, reason):
                    self._on_line(f"draining {', '.join(ids)}: {reason}")
                    with self._reported("the machines cannot be drained"):
                        await self._provider.drain(list(ids), self._spec.grace_s)
                case Report(text):
                    self._on_line(text)
                case GiveUp(reason):
                    self._on_give_up(reason)

    async def _request(self, action: RequestMachines) -> None:
        now = self._clock.now()
        try:
            ids = await self._provider.request(self._spec, action.request)
        except UsageError as error:  # it will not work later either
            self._on_give_up(str(error))
        except RunError as error:
            await self._execute(self.controller.handle_refused(action.request, str(error), now))
        else:
            await self._execute(self.controller.handle_granted(action.request, ids, now))

    async def _follow_notices(self) -> None:
        """Pass announcements of the engine on to the agents, and let the controller request replacements at once."""
        while True:
            with self._reported("the notices of the engine cannot be read"):
                async for notice in self._provider.notices():
                    await self._execute(self.controller.handle_notice(notice))
                    with self._reported(f"machine {notice.id} cannot be notified of its preemption"):
                        await self._provider.drain([notice.id], notice.deadline_s)
                return  # the engine has no notices
            await self._clock.sleep(_MAX_POLL_S)

    async def _follow_prices(self) -> None:
        """Read the prices periodically, if there is a choice."""
        offers = self.controller.target.offers
        while True:
            await self._clock.sleep(_PRICE_S)
            for offer in offers:
                with self._reported("the prices cannot be read"):
                    price = await self._clock.run_in_thread(self._provider.price, offer.request)
                    self.controller.set_price(offer.request, price)

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Report an error of the provider and go on."""
        try:
            yield
        except RunError as error:
            self._on_line(f"{what}: {error}")

    def _remind(self, machines: Iterable[Machine], in_run: Mapping[str, bool]) -> None:
        """Say every half minute what is waited for, while machines are missing."""
        now, wanted = self._clock.now(), self.controller.target.count
        if len(in_run) >= wanted:
            self._waits_since = None
            return
        if self._waits_since is None:
            self._waits_since = self._reminded_at = now
        if now - self._reminded_at < _REMIND_S:
            return
        self._reminded_at = now
        self._on_line(_waiting_sentence(machines, in_run, wanted, now - self._waits_since))


async def tear_down(provider: MachineProvider, clock: Clock, on_line: Callable[[str], None]) -> None:
    """End everything of a launch. Raises RunError if that is not possible after several attempts."""
    for attempt in range(1, _TEARDOWN_ATTEMPTS + 1):
        try:
            await provider.down()
            return
        except RunError as error:
            if attempt == _TEARDOWN_ATTEMPTS:
                raise
            on_line(f"the machines cannot be ended yet: {error}")
        await clock.sleep(_TEARDOWN_RETRY_S)


def _waiting_sentence(machines: Iterable[Machine], in_run: Mapping[str, bool], wanted: int, waited_s: float) -> str:
    """What is missing, and what is known about it."""
    absent = [machine for machine in machines if machine.state != "ended" and machine.id not in in_run]
    words = [
        f"{machine.id} is {machine.state}" + (f" ({machine.reason})" if machine.reason else "") for machine in absent
    ]
    known = f": {', '.join(words[:4])}{' ...' * (len(words) > 4)}" if words else ""
    return f"{len(in_run)} of {wanted} machines have joined, waiting for {waited_s:.0f} s{known}"
