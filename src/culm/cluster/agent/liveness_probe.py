"""Liveness probe: checks whether the node behind a broken connection is gone.

A machine that is up refuses a connection to a process that has ended. In that case the node's session is ended, so that
the store informs all nodes at once. A machine that does not answer at all is left to its lease.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from culm.cluster.run_setup import decode_node_record
from culm.cluster.store.store import Store
from culm.errors import RunError

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.transport.interface import Address

RefusesConnection = Callable[["Address"], Awaitable[bool]]
"""Whether the machine at an address answers that nothing listens there any more."""
_RETRY_DELAYS_S = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, *(0.25,) * 40)
"""Delays between probes, ten seconds in total. The worker of a killed node may end, and its connections break, long
before the agent does: on a busy machine a killed process can wait for seconds until it gets a core to end on. Until
then it listens."""


class EvictingStore(Store, Protocol):
    """A store whose sessions outlive their clients for a while, and in which a client can end another's session."""

    async def evict(self, key: str) -> bool:
        """End the session that a key belongs to, as if its machine were gone. Returns False if there is none."""


class LivenessProber:
    """Knows the nodes that this agent is connected to, and probes a node when a connection to it breaks."""

    def __init__(self, store: EvictingStore, refuses_connection: RefusesConnection, clock: Clock) -> None:
        self._store, self._refuses_connection, self._clock = store, refuses_connection, clock
        self._nodes: dict[Address, tuple[str, Address]] = {}
        """By address of an agent or worker: the key of its node, and the address of its agent."""
        self._probes: dict[str, asyncio.Task[None]] = {}

    def add_node(self, key: str, encoded_record: bytes) -> Address:
        """Register a node; returns the address of its agent."""
        node_record = decode_node_record(encoded_record)
        for address in filter(None, (node_record.agent, *node_record.workers)):
            self._nodes[address] = (key, node_record.agent)
        return node_record.agent

    def handle_broken_connection(self, address: Address) -> None:
        """Probe the node of this address, unless a probe is running."""
        if address in self._nodes:
            key, agent = self._nodes[address]
            if key not in self._probes:
                probe = self._probes[key] = asyncio.create_task(self._probe(key, agent))
                probe.add_done_callback(lambda _: self._probes.pop(key))

    async def _probe(self, key: str, agent: Address) -> None:
        for pause in _RETRY_DELAYS_S:
            await self._clock.sleep(pause)
            if await self._refuses_connection(agent):
                with contextlib.suppress(RunError):  # this agent has lost the store, and notices that elsewhere
                    await self.evict_node(key)
                self._nodes = {address: known for address, known in self._nodes.items() if known != (key, agent)}
                return

    async def evict_node(self, key: str) -> None:
        """End the session of the node with this key, so that the run continues without it."""
        await self._store.evict(key)

    async def close(self) -> None:
        probes = list(self._probes.values())
        for task in probes:
            task.cancel()
        await asyncio.gather(*probes, return_exceptions=True)


async def refuses_connection(address: Address) -> bool:
    """Probe over TCP. A timeout or any other error says nothing: returns False."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        try:
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(host, int(port))
            writer.close()
        except ConnectionRefusedError:
            return True
    return False
