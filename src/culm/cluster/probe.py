"""A broken connection is a suspicion. Whether the node behind it is gone can be asked: a machine that is up refuses a
connection to a process that is not there. Then its session is ended, and the store tells everybody at once; a machine
that does not answer at all is left to its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from culm.cluster.setup import decode_node
from culm.cluster.store import Store

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.transport.base import Address

Refuses = Callable[["Address"], Awaitable[bool]]
"""Whether the machine at an address says that nobody listens there any more."""
_PAUSES_S = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Between questions: a process that is being ended may still listen when its first connection breaks."""


class EvictingStore(Store, Protocol):
    """A store whose sessions outlive their clients for a while, and can be ended by others."""

    async def evict(self, key: str) -> bool:
        """End the session that a key belongs to, as if its machine were gone; False: there is no such session."""


class Prober:
    """Knows by address whom this agent is connected to, and looks into it when a connection breaks."""

    def __init__(self, store: EvictingStore, refuses: Refuses, clock: Clock) -> None:
        self._store, self._refuses, self._clock = store, refuses, clock
        self._nodes: dict[Address, tuple[str, Address]] = {}
        """By address of an agent or a worker: the key of its node, and the address of its agent."""
        self._asking: dict[str, asyncio.Task[None]] = {}

    def know(self, key: str, record: bytes) -> Address:
        """A node has joined; returns the address of its agent."""
        found = decode_node(record)
        for address in filter(None, (found.agent, found.worker)):
            self._nodes[address] = (key, found.agent)
        return found.agent

    def broke(self, address: Address) -> None:
        """A connection to or from somebody broke."""
        if address in self._nodes:
            key, agent = self._nodes[address]
            if key not in self._asking or self._asking[key].done():
                self._asking[key] = asyncio.create_task(self._ask(key, agent))

    async def _ask(self, key: str, agent: Address) -> None:
        for pause in _PAUSES_S:
            await self._clock.sleep(pause)
            if await self._refuses(agent):
                await self.evict(key)
                return

    async def evict(self, key: str) -> None:
        """The node of a key is gone, or as good as gone: everybody is to go on without it."""
        await self._store.evict(key)

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)


async def refuses(address: Address) -> bool:
    """Ask over TCP. Silence and every other trouble say nothing."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
        except ConnectionRefusedError:
            return True
    return False
