"""The machines of a simulated cluster: what a fault does to them, to their connections and to their sessions."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Iterable
from contextvars import Context
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from culm.cluster.store import Change
from culm.errors import RunError
from culm.testing.loop import virtual_loop

if TYPE_CHECKING:
    from culm.cluster.store import MemoryStore
    from culm.testing.history import History
    from culm.transport.base import Address
    from culm.transport.memory import MemoryNetwork

T = TypeVar("T")


@functools.cache
def node_of(address: Address) -> int:
    """The node of an endpoint of a simulated cluster: 3 of agent-3 and of worker-3."""
    return int(address.rpartition("-")[2])


class Machines:
    """Nodes that can vanish, stand still or be cut off. One that is silent for `lease_s` has lost its session in the
    store: the others are told that it is gone, and whatever it asks of the store later fails."""

    def __init__(self, network: MemoryNetwork, store: MemoryStore, history: History, lease_s: float) -> None:
        self.network, self.store, self.history, self.lease_s = network, store, history, lease_s
        self.gone: set[int] = set()
        """Killed, or silent for so long that the others were told so."""
        self._cuts: list[frozenset[int]] = []
        self._outages = 0
        """How many outages of the store are under way."""
        self._ending: list[int] = []
        """Nodes whose session ends when the store is back."""
        self._healed = asyncio.Event()
        self._sessions: dict[int, Session] = {}
        self._leases: dict[int, asyncio.TimerHandle] = {}

    def session(self, node: int) -> Session:
        """What the node knows the store by."""
        made = self._sessions[node] = Session(self, node)
        return made

    def kill(self, nodes: Iterable[int], *, silence: bool = False) -> None:
        """The nodes vanish at once: nothing of them takes another step, and every connection to them breaks. Before the
        first epoch whoever provides them says so in the store, since nobody may know them yet."""
        for node in nodes:
            self.history.note(node, "killed")
            for address in sorted(address for address in self.network.endpoints if node_of(address) == node):
                self.network.drop(address, silence=silence)
            virtual_loop().end(node)
            self._end_session(node)
            if self.store.read("epoch") is None:
                self.store.write(f"missing/{node}", b"")

    def pause(self, node: int, seconds: float) -> None:
        """The node stands still. Its connections stand, and what is sent to it waits."""
        if node in self.gone or node in virtual_loop().held:
            return
        self.history.note(node, f"paused for {seconds:g} s")
        virtual_loop().pause(node)
        self._fall_silent(node)
        _later(seconds, self._resume, node)

    def _resume(self, node: int) -> None:
        self.history.note(node, "goes on")
        virtual_loop().resume(node)
        self._speak(node)

    def cut_off(self, nodes: frozenset[int], seconds: float) -> None:
        """The nodes hear nothing of the others and of the store any more, nor the others of them."""
        self.history.note(None, f"nodes {_listed(nodes)} are cut off for {seconds:g} s")
        self._cuts.append(nodes)
        for node in nodes:
            self._fall_silent(node)
        _later(seconds, self._heal, nodes)

    def _heal(self, nodes: frozenset[int]) -> None:
        self.history.note(None, f"nodes {_listed(nodes)} are no longer cut off")
        self._cuts.remove(nodes)
        everybody = sorted(self.network.endpoints)
        inside = [address for address in everybody if node_of(address) in nodes]
        for one, other in product(inside, everybody):
            if node_of(other) not in nodes and self.hears(node_of(one), node_of(other)):
                self.network.sever(one, other)
        for node in nodes:
            self._speak(node)
        self._wake()

    def _wake(self) -> None:
        """Whoever waits for the store looks again."""
        self._healed.set()
        self._healed.clear()

    @property
    def cut(self) -> bool:
        """Whether anybody is cut off."""
        return bool(self._cuts)

    def hears(self, one: int, other: int) -> bool:
        """Whether no cut lies between two nodes."""
        return all((one in cut) == (other in cut) for cut in self._cuts)

    async def reach_store(self, node: int) -> None:
        """Wait until the node can speak to the store."""
        while self._outages or any(node in cut for cut in self._cuts):
            await self._healed.wait()

    def lose_store(self, seconds: float) -> None:
        """The store answers nobody, and takes note of nothing, for a while."""
        self.history.note(None, f"the store is out of reach for {seconds:g} s")
        self._outages += 1
        for lease in self._leases.values():
            lease.cancel()
        _later(seconds, self._find_store, None)

    def _find_store(self, _: None) -> None:
        self._outages -= 1
        if self._outages:
            return
        self.history.note(None, "the store is back")
        self._leases = {node: _later(self.lease_s, self._expire, node) for node in self._leases}
        for node in self._ending:
            self.store.end(f"agent-{node}")
        self._ending.clear()
        self._wake()

    def _fall_silent(self, node: int) -> None:
        if node not in self._leases and node not in self.gone:
            self._leases[node] = _later(self.lease_s, self._expire, node)
            if self._outages:  # it begins anew when the store is back
                self._leases[node].cancel()

    def _expire(self, node: int) -> None:
        self.history.note(node, f"silent for {self.lease_s:g} s: its session in the store has ended")
        self._end_session(node)

    def _speak(self, node: int) -> None:
        """It is heard again, unless it is silent for another reason too."""
        if node not in virtual_loop().held and not any(node in cut for cut in self._cuts) and node in self._leases:
            self._leases.pop(node).cancel()

    def _end_session(self, node: int) -> None:
        self.gone.add(node)
        if node in self._sessions:
            self._sessions[node].end()
        self.end_session(node)

    def end_session(self, node: int) -> None:
        """The node's keys go, as soon as the store takes note."""
        if self._outages:
            self._ending.append(node)
        else:
            self.store.end(f"agent-{node}")


class Session:
    """The store as a node of a simulated cluster sees it. Out of reach: calls wait. Ended: calls raise RunError."""

    def __init__(self, machines: Machines, node: int) -> None:
        self._machines, self._node = machines, node
        self._store = machines.store
        self._name = f"agent-{node}"
        self._ended = False
        self._watches: list[asyncio.Queue[Change | None]] = []

    def end(self) -> None:
        """The node was silent for too long. Whoever waits for news of the store hears of it when it is in reach."""
        self._ended = True
        for queue in self._watches:
            queue.put_nowait(None)

    async def _reach(self) -> MemoryStore:
        await self._machines.reach_store(self._node)
        if self._ended:
            raise RunError(f"the session of node {self._node} in the store has ended: it counts as gone")
        return self._store

    async def get(self, key: str) -> bytes | None:
        return (await self._reach()).read(key)

    async def put(self, key: str, value: bytes, *, session: bool = False) -> None:
        (await self._reach()).write(key, value, self._name if session else None)

    async def delete(self, key: str) -> None:
        (await self._reach()).delete(key)

    async def swap(self, key: str, old: bytes | None, new: bytes, *, session: bool = False) -> bool:
        return (await self._reach()).swap(key, old, new, self._name if session else None)

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        store = await self._reach()
        queue: asyncio.Queue[Change | None] = asyncio.Queue()
        end = store.listen(prefix, queue.put_nowait)
        self._watches.append(queue)
        try:
            while True:
                change = await queue.get()
                await self._reach()
                assert change is not None
                yield change
        finally:
            end()
            self._watches.remove(queue)


def _later(seconds: float, action: Callable[[T], None], what: T) -> asyncio.TimerHandle:
    """A timer that belongs to no node: it runs though everybody stands still."""
    return asyncio.get_running_loop().call_later(seconds, action, what, context=Context())


def _listed(nodes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))
