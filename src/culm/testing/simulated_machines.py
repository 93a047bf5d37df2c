"""Simulated machines: the effect of faults on the nodes of a simulated cluster, their connections and their
sessions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterable
from contextvars import Context
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from culm.cluster.store.store import SessionLost, StoreChange
from culm.cluster.timeouts import DEFAULT_BLOCKED_S
from culm.testing.virtual_time import virtual_loop

if TYPE_CHECKING:
    from culm.cluster.store.store import MemoryStore
    from culm.testing.run_history import RunHistory
    from culm.transport.frames.simulated_network import SimulatedNetwork
    from culm.transport.interface import Address

T = TypeVar("T")


@functools.cache
def node_of(address: Address) -> int:
    """The node of an endpoint of a simulated cluster: 3 of agent-3, of worker-3 and of worker1-3."""
    return int(address.rpartition("-")[2])


class SimulatedMachines:
    """Nodes that can vanish, stop running or be cut off. A node that is silent for `lease_s` loses its session in the
    store: the others see that it is gone, and all its later store calls fail."""

    def __init__(
        self,
        network: SimulatedNetwork,
        store: MemoryStore,
        history: RunHistory,
        lease_s: float,
        blocked_s: float = DEFAULT_BLOCKED_S,
    ) -> None:
        """`blocked_s`: how long the session of a node with a blocked event loop is kept alive."""
        self.network, self.store, self.history, self.lease_s = network, store, history, lease_s
        self.blocked_s = blocked_s
        self.lost_nodes: set[int] = set()
        """Nodes that were killed, or lost their session."""
        self._partitions: list[frozenset[int]] = []
        self._cut_off_from_store: set[int] = set()
        """Nodes that reach all others, but not the store."""
        self._outages = 0
        """Number of store outages in progress."""
        self._sessions_to_end: list[int] = []
        """Nodes whose session ends when the store is back."""
        self._store_reachable = asyncio.Event()
        self._sessions: dict[int, SimulatedStoreSession] = {}
        self._leases: dict[int, asyncio.TimerHandle] = {}
        self._blocked_nodes: set[int] = set()

    async def reopen_session(self, node: int) -> tuple[SimulatedStoreSession, None]:
        """Open another session of a node that runs and has lost its session. Waits until it can reach the store."""
        await self.wait_for_store(node)
        self.history.add(node, "has a new session in the store")
        self.lost_nodes.discard(node)
        return self.open_session(node), None

    def open_session(self, node: int) -> SimulatedStoreSession:
        """Open the node's session with the store."""
        session = self._sessions[node] = SimulatedStoreSession(self, node)
        return session

    def kill(self, nodes: Iterable[int], *, silence: bool = False) -> None:
        """Kill nodes at once: their code does not continue, and every connection to them breaks. Before the first epoch
        also report them as missing in the store, as a provider does, because the leader may not know them yet."""
        for node in nodes:
            self.history.add(node, "killed")
            for address in sorted(address for address in self.network.endpoints if node_of(address) == node):
                self.network.remove_endpoint(address, machine_lost=silence)
            virtual_loop().cancel_node(node)
            self._lose_node(node)
            if self.store.read("epoch") is None:
                self.store.write(f"missing/{node}", b"")

    def pause(self, node: int, seconds: float) -> None:
        """Stop a node for a while. Its connections stay open, and messages to it wait."""
        if node in self.lost_nodes or node in virtual_loop().paused:
            return
        self.history.add(node, f"paused for {seconds:g} s")
        virtual_loop().pause(node)
        self._start_lease_timer(node)
        _call_later_off_node(seconds, self._resume, node)

    def block(self, node: int, seconds: float) -> None:
        """Block the event loop of a node for a while. Its session in the store is kept alive for `blocked_s`."""
        if node in self.lost_nodes or node in virtual_loop().paused:
            return
        self.history.add(node, f"its event loop is blocked for {seconds:g} s")
        virtual_loop().pause(node)
        self._blocked_nodes.add(node)
        if seconds > self.blocked_s:
            self._start_lease_timer(node, self.blocked_s)
        _call_later_off_node(seconds, self._resume, node)

    def _resume(self, node: int) -> None:
        self.history.add(node, "goes on")
        virtual_loop().resume(node)
        self._blocked_nodes.discard(node)
        self._cancel_lease_timer(node)

    def partition(self, nodes: frozenset[int], seconds: float) -> None:
        """Cut nodes off from all others and from the store, in both directions."""
        self.history.add(None, f"nodes {_format_node_numbers(nodes)} are cut off for {seconds:g} s")
        self._partitions.append(nodes)
        for node in nodes:
            self._start_lease_timer(node)
        _call_later_off_node(seconds, self._end_partition, nodes)

    def _end_partition(self, nodes: frozenset[int]) -> None:
        self.history.add(None, f"nodes {_format_node_numbers(nodes)} are no longer cut off")
        self._partitions.remove(nodes)
        addresses = sorted(self.network.endpoints)
        inside = [address for address in addresses if node_of(address) in nodes]
        for one, other in product(inside, addresses):
            if node_of(other) not in nodes and self.connected(node_of(one), node_of(other)):
                self.network.break_connection(one, other)
        for node in nodes:
            self._cancel_lease_timer(node)
        self._notify_store_waiters()

    def cut_off_from_store(self, nodes: frozenset[int], seconds: float) -> None:
        """Cut nodes off from the store, not from each other."""
        self.history.add(None, f"nodes {_format_node_numbers(nodes)} cannot reach the store for {seconds:g} s")
        self._cut_off_from_store |= nodes
        for node in nodes:
            self._start_lease_timer(node)
        _call_later_off_node(seconds, self._reconnect_to_store, nodes)

    def _reconnect_to_store(self, nodes: frozenset[int]) -> None:
        self._cut_off_from_store -= nodes
        for node in nodes:
            self._cancel_lease_timer(node)
        self._notify_store_waiters()

    def _notify_store_waiters(self) -> None:
        """Let all waits for the store check again."""
        self._store_reachable.set()
        self._store_reachable.clear()

    @property
    def has_partition(self) -> bool:
        """Whether any node is cut off."""
        return bool(self._partitions)

    def connected(self, one: int, other: int) -> bool:
        """Whether no partition separates two nodes."""
        return all((one in isolated) == (other in isolated) for isolated in self._partitions)

    async def wait_for_store(self, node: int) -> None:
        """Wait until the node can reach the store."""
        while self._outages or self._cannot_reach_store(node):
            await self._store_reachable.wait()

    def _cannot_reach_store(self, node: int) -> bool:
        """Whether a node is cut off from the store."""
        return node in self._cut_off_from_store or any(node in isolated for isolated in self._partitions)

    def start_store_outage(self, seconds: float) -> None:
        """Make the store unreachable for a while: it answers nothing and ends no session."""
        self.history.add(None, f"the store is out of reach for {seconds:g} s")
        self._outages += 1
        for lease in self._leases.values():
            lease.cancel()
        _call_later_off_node(seconds, self._end_store_outage, None)

    def _end_store_outage(self, _: None) -> None:
        self._outages -= 1
        if self._outages:
            return
        self.history.add(None, "the store is back")
        self._leases = {node: _call_later_off_node(self.lease_s, self._expire_lease, node) for node in self._leases}
        for node in self._sessions_to_end:
            self.store.end_session(f"agent-{node}")
        self._sessions_to_end.clear()
        self._notify_store_waiters()

    def pause_store(self, seconds: float, expired: Iterable[int] | None) -> None:
        """Stop the store for a while. Afterwards the sessions of some nodes have ended; None: of all nodes."""
        self.start_store_outage(seconds)
        _call_later_off_node(seconds, self.expire_sessions, expired)

    def expire_sessions(self, expired: Iterable[int] | None) -> None:
        """End the sessions of some nodes that run; None: of all nodes."""
        for node in sorted(self._sessions if expired is None else expired):
            if node in self._sessions and node not in self.lost_nodes:
                self._expire_lease(node)

    def _start_lease_timer(self, node: int, seconds: float | None = None) -> None:
        """End the session of a node after `seconds`; default: after its lease."""
        if node not in self._leases and node not in self.lost_nodes:
            self._leases[node] = _call_later_off_node(seconds or self.lease_s, self._expire_lease, node)
            if self._outages:  # the lease restarts when the store is back
                self._leases[node].cancel()

    def _expire_lease(self, node: int) -> None:
        silent_s = self.blocked_s if node in self._blocked_nodes else self.lease_s
        self.history.add(node, f"silent for {silent_s:g} s: its session in the store has ended")
        self._lose_node(node)

    def _cancel_lease_timer(self, node: int) -> None:
        """Stop the lease timer of a node, unless the node is silent for another reason."""
        if node not in virtual_loop().paused and not self._cannot_reach_store(node) and node in self._leases:
            self._leases.pop(node).cancel()

    def _lose_node(self, node: int) -> None:
        self.lost_nodes.add(node)
        if node in self._sessions:
            self._sessions[node].end()
        self.end_session(node)

    def end_session(self, node: int) -> None:
        """Delete the node's session keys, at once or when the store is back."""
        if self._outages:
            self._sessions_to_end.append(node)
        else:
            self.store.end_session(f"agent-{node}")


class SimulatedStoreSession:
    """The store as seen by one simulated node. While it is unreachable, calls wait; after the end of the session, calls
    raise SessionLost."""

    def __init__(self, machines: SimulatedMachines, node: int) -> None:
        self._machines, self._node = machines, node
        self._store = machines.store
        self._name = f"agent-{node}"
        self._ended = False
        self._watches: list[asyncio.Queue[StoreChange | None]] = []

    def end(self) -> None:
        """End the session. Watches raise SessionLost as soon as the store is reachable."""
        self._ended = True
        for queue in self._watches:
            queue.put_nowait(None)

    async def _wait_for_store(self) -> MemoryStore:
        await self._machines.wait_for_store(self._node)
        if self._ended:
            raise SessionLost(f"the session of node {self._node} in the store has ended: it counts as lost")
        return self._store

    async def get(self, key: str) -> bytes | None:
        return (await self._wait_for_store()).read(key)

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        (await self._wait_for_store()).write(key, value, self._name if session else None)

    async def delete(self, key: str) -> None:
        (await self._wait_for_store()).delete(key)

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        return (await self._wait_for_store()).swap(key, old, new, self._name if session else None)

    async def watch(self, prefix: str) -> AsyncGenerator[StoreChange, None]:
        store = await self._wait_for_store()
        queue: asyncio.Queue[StoreChange | None] = asyncio.Queue()
        end = store.listen(prefix, queue.put_nowait)
        self._watches.append(queue)
        try:
            while True:
                change = await queue.get()
                await self._wait_for_store()
                assert change is not None
                yield change
        finally:
            end()
            self._watches.remove(queue)


def _call_later_off_node(seconds: float, action: Callable[[T], None], what: T) -> asyncio.TimerHandle:
    """A timer that belongs to no node: it also fires while nodes are paused."""
    return asyncio.get_running_loop().call_later(seconds, action, what, context=Context())


def _format_node_numbers(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))
