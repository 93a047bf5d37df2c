"""A machine that takes part in a run which somebody else started: `culm agent`."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.members import take_numbers
from culm.cluster.setup import JobReference, decode_reference, decode_setup
from culm.errors import RunError
from culm.providers.base import REJOIN
from culm.providers.local import LocalProvider
from culm.providers.nursery import JobSource, Meet, Met, Refused, Start, refused
from culm.providers.stores import Place, opened
from culm.runtime.clock import RealClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from culm.cluster.store import Store
    from culm.providers.local import LocalNursery

_RETURNS = 20
"""How often a machine comes back: a worker that ends again and again has a reason that stays."""


class Attendance:
    """One node of this machine at a time, from the moment that the job is there until it has a result."""

    def __init__(self, nursery: LocalNursery, place: Place, order: Start, say: Callable[[str], None]) -> None:
        """Nodes are started by this order. `say`: what a person wants to know, in sentences."""
        self._nursery, self._place, self._order, self._say = nursery, place, order, say
        self._provider = LocalProvider(nursery, order)
        self._node: int | None = None
        self._leaving = False

    async def run(self, path: tuple[str, ...]) -> None:
        """Join, and come back as a new node after every loss. `path`: where the job's modules are found.

        UsageError: etcd can not be used, the secret is another, or this machine differs from what the job needs;
        nothing was disturbed. RunError: the node failed in a way that would only repeat itself.
        """
        await self._meet(path)
        for _ in range(_RETURNS):
            if not await self._join():
                return
            status = (await self._provider.gone()).status
            if status == 0 or self._leaving:
                return
            if status != REJOIN and status > 0:  # below zero: a signal ended it, and the machine is still there
                raise RunError(f"node {self._node} ended with status {status}: what it printed says why")
            self._say(f"the run went on without node {self._node}: this machine comes back as a new node")
        raise RunError(f"this machine was lost {_RETURNS} times: look at what its worker printed")

    def leave(self, notice_s: float) -> bool:
        """Hand over what is needed and go, within so many seconds. False: there is nothing to hand over yet."""
        self._leaving = True
        if self._node is not None:
            self._provider.stop(self._node, notice_s)
        return self._node is not None

    async def _meet(self, path: tuple[str, ...]) -> None:
        """Wait for the job, import it, and see that this machine agrees on it."""
        async with opened(self._place, RealClock(), self._say) as store:
            job = await self._posted(store)
        self._nursery.order(Meet(JobSource(job.reference, job.overrides, path=path), job.identity))
        while True:
            match await self._nursery.report():
                case Met():
                    return
                case Refused() as report:
                    raise refused(report)

    async def _posted(self, store: Store) -> JobReference:
        found = await store.get("job")
        if found is None:
            self._say(f"waiting for culm run --job {self._place.job}")
            async with aclosing(store.watch("job")) as changes:
                async for key, value in changes:
                    if key == "job" and value is not None:
                        found = value
                        break
        return decode_reference(found or b"")

    async def _join(self) -> bool:
        """Start a node under a number of its own; False: the run has ended."""
        async with opened(self._place, RealClock(), self._say) as store:
            setup = await store.get("setup")
            if setup is None or await store.get("result") is not None:
                self._say(f"job {self._place.job} has ended")
                return False
            self._follow(decode_setup(setup).suspect_after)
            (self._node,) = await take_numbers(store)
        self._provider.start(self._node, self._order.zone)
        self._say(f"joining job {self._place.job} as node {self._node}")
        return True

    def _follow(self, suspect_after: float) -> None:
        """Nodes of one run have one idea of how long a silence may be."""
        place = msgspec.structs.replace(self._place, suspect_after=suspect_after)
        self._provider = LocalProvider(self._nursery, msgspec.structs.replace(self._order, place=place))
