"""LaunchedRun: a run on machines of a provider. It starts the store, keeps the machines, and ends all of them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from culm.errors import CulmError, RunError
from culm.machines.fleet_controller import FleetController, FleetTarget, MachineOffer
from culm.machines.head_store import head_etcd, head_token, open_head_folder
from culm.machines.join_token import encode_token, read_token
from culm.machines.launch_registry import RegisteredLaunch, provider_settings
from culm.machines.machine_fleet import MachineFleet, tear_down
from culm.machines.machine_provider import LaunchSpec, known_prices
from culm.machines.machine_provider_registry import open_machine_provider
from culm.market.rental_cost import rental_terms
from culm.plan.rent.fleet_decision import FleetDecision, FleetLimits, NodeOffers, decide_fleet
from culm.providers.advertised_address import default_address
from culm.providers.private_etcd import free_port
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from pathlib import Path

    from culm.config import RunConfig
    from culm.machines.launch_order import LaunchOrder
    from culm.machines.machine_provider import Machine, MachineProvider
    from culm.providers.run_handle import RunHandle

OnLine = Callable[[str], None]
_LEAVE_TIMEOUT_S = 15.0
"""Limit for agents to end by themselves after the run has ended; then their machines are ended."""
_LEAVE_POLL_S = 0.25
_DECISION_S = 5.0
"""Time between two decisions about on-demand machines."""


class LaunchedRun:
    """The machines of one run, from the first request until all have ended."""

    def __init__(self, order: LaunchOrder, config: RunConfig, provider: MachineProvider, on_line: OnLine) -> None:
        """`config` has a token in its field `join`."""
        self.config = config
        self._order, self._provider, self._on_line = order, provider, on_line
        self._requested = False

    async def keep_machines(self, run: RunHandle) -> None:
        """Request machines for a run, and replace lost ones, until cancelled."""
        self._requested = True
        offers = tuple(MachineOffer(each, self._provider.price(each)) for each in self._order.requests)
        target = FleetTarget(
            market=self._order.requests[0].market,
            count=run.setup.nodes,
            offers=offers,
            preemption_rate=self.config.preemption_rate,
            max_price=math.inf if self._order.max_price is None else self._order.max_price,
            join_within_s=self._order.join_within_s,
        )
        controller = FleetController(target)
        fleet = MachineFleet(
            self._provider,
            self._launch_spec(offers),
            controller,
            RealClock(),
            in_run=lambda: run.machines_in_run,
            advised=lambda: run.advised_machines,
            on_machines=lambda machines: self._report_prices(run, machines),
            on_line=self._on_line,
            on_give_up=lambda reason: run.fail(f"the launch is given up: {reason}"),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_deadline(run, controller))
                await fleet.keep()
        except* Exception as group:  # a provider that fails in an unexpected way must not leave the run waiting
            error = group.exceptions[0]
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            run.fail(f"the machines cannot be kept: {type(error).__name__}: {error}")

    async def _keep_deadline(self, run: RunHandle, controller: FleetController) -> None:
        """Decide now and then how many machines must be on-demand ones for the run to keep its deadline."""
        if self.config.deadline is None:
            return
        limits = FleetLimits(
            budget_usd=math.inf if self.config.budget is None else self.config.budget,
            deadline_s=self.config.deadline,
            max_price_usd_h=controller.target.max_price,
        )
        decided: FleetDecision | None = None
        while True:
            await asyncio.sleep(_DECISION_S)
            if run.progress is None:
                continue
            prices = NodeOffers(
                spot_usd_h=controller.lowest_price("spot"), on_demand_usd_h=controller.lowest_price("on-demand")
            )
            decision = decide_fleet(run.progress, limits, prices)
            if decision == decided:
                continue
            decided = decision
            wanted = 0 if decision.stop else min(decision.on_demand, run.setup.nodes)
            if any(offer.request.market == "spot" for offer in controller.target.offers):  # else there is no choice
                for report in controller.set_on_demand(wanted, decision.why):
                    self._on_line(report.text)
            run.report_fleet(decision)

    def _report_prices(self, run: RunHandle, machines: Iterable[Machine]) -> None:
        """Tell the leader what the machines in the run cost."""
        for machine in machines:
            if machine.state == "running" and machine.price_per_h:
                terms = rental_terms(
                    instance=machine.instance or None,
                    market=machine.market,
                    usd_h=machine.price_per_h,
                    zone=machine.zone,
                    machine=machine.id,
                    rented_at=machine.started_at or None,
                )
                if terms is not None:
                    run.set_rental(machine.id, terms)

    def _launch_spec(self, offers: tuple[MachineOffer, ...]) -> LaunchSpec:
        assert self.config.join is not None
        order = self._order
        return LaunchSpec(
            launch=order.launch,
            job=order.job,
            token=self.config.join,
            program=order.program,
            image=order.image,
            notice=order.notice,
            grace_s=order.grace_s,
            abandon_after_s=order.abandon_after_s,
            environment=order.environment,
            prices=known_prices((each.request, each.price_per_h) for each in offers),
        )

    async def end_machines(self) -> None:
        """Wait a moment until the agents have left by themselves, then end everything. Raises RunError if something may
        be left."""
        if self._requested:
            await self._wait_until_left()
        await tear_down(self._provider, RealClock(), self._on_line)

    async def _wait_until_left(self) -> None:
        with suppress(TimeoutError, RunError):
            async with asyncio.timeout(_LEAVE_TIMEOUT_S):
                while any(machine.state == "running" for machine in await self._provider.machines()):
                    await asyncio.sleep(_LEAVE_POLL_S)


@asynccontextmanager
async def open_launch(order: LaunchOrder, config: RunConfig, name: str, on_line: OnLine) -> AsyncIterator[LaunchedRun]:
    """Prepare the launch of a run: its entry in the registry and, unless `config.join` names one, its store.

    `name`: name of the job on this machine. Afterwards, also after an error or a
    cancellation, no machine of the launch is left; if that fails, a sentence says so and its entry stays for
    `culm down`.
    """
    registered = RegisteredLaunch(name, order, config.nodes or 0)
    forget = False
    try:
        provider = open_machine_provider(order.provider, provider_settings(order, registered.folder))
        async with AsyncExitStack() as stack:
            if config.join is None:
                token = await stack.enter_async_context(_open_head(order, registered.folder / "head", on_line))
            else:
                decoded = read_token(config.join)
                assert decoded is not None
                token = encode_token(decoded)  # the machines cannot read a file or a variable of this one
            launched = LaunchedRun(
                order, dataclasses.replace(config, join=token, job_name=order.job), provider, on_line
            )
            try:
                yield launched
            finally:
                forget = await _end_machines(launched, name, on_line)
    finally:
        registered.close(forget=forget)


async def _end_machines(launched: LaunchedRun, name: str, on_line: OnLine) -> bool:
    """End the machines of a launch. Returns whether nothing is left."""
    try:
        await launched.end_machines()
    except CulmError as error:
        on_line(f"machines may be left: {error}; end them with culm down {name}")
        return False
    return True


@asynccontextmanager
async def _open_head(order: LaunchOrder, path: Path, on_line: OnLine) -> AsyncIterator[str]:
    """A store of this launch alone. Yields its token."""
    host = order.address or default_address()
    port = order.port or free_port()
    folder = open_head_folder(path, [host, "127.0.0.1", "localhost"])
    async with head_etcd(folder, host, port) as etcd:
        keeping = asyncio.create_task(etcd.keep_running(on_line))
        try:
            yield encode_token(head_token(folder, host, port))
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
