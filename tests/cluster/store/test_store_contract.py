"""The contract of the store: in its own process, over memory, over sockets, and in etcd."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cluster.store.etcd import EtcdStore
from culm.cluster.store.store import MemoryStore, RemoteStore, Store, StoreChange, StoreServer
from culm.errors import RunError
from culm.providers.private_etcd import PrivateEtcd
from culm.testing import run_virtual
from culm.transport.frames.simulated_network import SimulatedNetwork
from culm.transport.frames.sockets import SocketTransport
from culm.transport.interface import Transport

PATIENCE_S = 30.0


@dataclass
class World:
    """A store, and clients that connect and disconnect."""

    store: MemoryStore = field(default_factory=MemoryStore)
    endpoint: Callable[[], Transport] | None = None
    """Makes an endpoint; None: clients are in the store's process."""
    server: Transport | None = None
    serving: asyncio.Task[None] | None = None
    _leave: dict[int, Callable[[], Awaitable[None]]] = field(default_factory=dict)

    async def client(self) -> Store:
        if self.endpoint is None:
            name = f"client-{len(self._leave)}"
            here = self.store.client(name)

            async def end() -> None:
                self.store.end_session(name)

            self._leave[id(here)] = end
            return here
        assert self.server is not None
        transport = self.endpoint()
        far = RemoteStore(self.server.address, transport)
        reading = asyncio.create_task(_read(far, transport))

        async def close() -> None:
            reading.cancel()
            await transport.close()

        self._leave[id(far)] = close
        return far

    async def leave(self, client: Store) -> None:
        """End the client's process."""
        await self._leave.pop(id(client))()

    async def end(self) -> None:
        for leave in self._leave.values():
            await leave()
        await self.end_server()

    async def end_server(self) -> None:
        if self.serving is not None and self.server is not None:
            self.serving.cancel()
            await asyncio.gather(self.serving, return_exceptions=True)
            await self.server.close()
            self.serving = None


@dataclass
class EtcdWorld:
    """The keys of one job in etcd, and clients that connect and disconnect."""

    etcd: PrivateEtcd
    job: str
    _here: list[EtcdStore] = field(default_factory=list)

    async def client(self) -> Store:
        self._here.append(await EtcdStore.open(self.etcd.access, self.job))
        return self._here[-1]

    async def leave(self, client: Store) -> None:
        assert isinstance(client, EtcdStore)
        self._here.remove(client)
        await client.close()

    async def end(self) -> None:
        for client in self._here:
            await client.close()


async def _read(store: RemoteStore, transport: Transport) -> None:
    while True:
        sender, body = await transport.receive_message()
        assert sender == store.server
        store.handle_answer(body)


def sockets() -> Callable[[], Transport]:
    return lambda: SocketTransport(secret=b"secret")


def memory() -> Callable[[], Transport]:
    network, names = SimulatedNetwork(latency=0.01), iter(range(100))
    return lambda: network.endpoint(f"endpoint-{next(names)}")


def patiently(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main, PATIENCE_S)

    asyncio.run(bounded())


@dataclass(frozen=True)
class Side:
    name: str
    run: Callable[[Coroutine[Any, Any, None]], None]
    endpoints: Callable[[], Callable[[], Transport]] | None

    @asynccontextmanager
    async def world(self) -> AsyncIterator[World]:
        made = World(endpoint=self.endpoints() if self.endpoints else None)
        if made.endpoint is not None:
            made.server = made.endpoint()
            made.serving = asyncio.create_task(StoreServer(made.store, made.server).serve())
        try:
            yield made
        finally:
            await made.end()


@dataclass(frozen=True)
class EtcdSide:
    etcd: PrivateEtcd
    _jobs: ClassVar[Iterator[int]] = itertools.count()

    @staticmethod
    def run(main: Coroutine[Any, Any, None]) -> None:
        patiently(main)

    @asynccontextmanager
    async def world(self) -> AsyncIterator[EtcdWorld]:
        made = EtcdWorld(self.etcd, f"job-{next(self._jobs)}")
        try:
            yield made
        finally:
            await made.end()


HERE = Side("here", run_virtual, None)
MEMORY = Side("memory", run_virtual, memory)
SOCKETS = Side("sockets", patiently, sockets)
FAR = [MEMORY, SOCKETS]


@pytest.fixture(scope="module")
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@pytest.fixture(params=[HERE, *FAR, pytest.param(None, id="etcd", marks=pytest.mark.real)], ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side | EtcdSide:
    found: Side | None = request.param
    return found or EtcdSide(request.getfixturevalue("etcd"))


@pytest.fixture(params=[HERE, *FAR], ids=lambda side: side.name)
def own(request: pytest.FixtureRequest) -> Side:
    """The kinds of stores whose keys are in a MemoryStore."""
    found: Side = request.param
    return found


@pytest.fixture(params=FAR, ids=lambda side: side.name)
def far(request: pytest.FixtureRequest) -> Side:
    found: Side = request.param
    return found


async def seen(store: Store, prefix: str, count: int) -> list[StoreChange]:
    """The first changes of a new watch."""
    async with aclosing(store.watch(prefix)) as changes:
        found = []
        async for change in changes:
            found.append(change)
            if len(found) == count:
                break
        return found


async def watches_established(store: Store) -> None:
    """Wait until earlier watches are established: calls of a client are served in order."""
    await asyncio.sleep(0)
    await store.get("")


async def gone(store: Store, key: str) -> None:
    """Wait until a key does not exist."""
    async with aclosing(store.watch(key)) as changes:
        if await store.get(key) is None:
            return
        async for change in changes:
            if change == StoreChange(key, None):
                return


def test_a_key_has_the_value_that_was_put_last(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            one, other = await world.client(), await world.client()
            assert await one.get("epoch") is None
            await one.put("epoch", b"1")
            await other.put("epoch", b"2")
            assert await one.get("epoch") == await other.get("epoch") == b"2"

    side.run(main())


def test_an_empty_value_is_a_value(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            store = await world.client()
            await store.put("key", b"")
            assert await store.get("key") == b""
            assert not await store.swap("key", None, b"x")

    side.run(main())


def test_a_swap_sets_a_key_only_from_the_value_it_names(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            store = await world.client()
            assert not await store.swap("leader", b"x", b"y")
            assert await store.swap("leader", None, b"a")
            assert not await store.swap("leader", None, b"b")
            assert await store.swap("leader", b"a", b"c")
            assert await store.get("leader") == b"c"

    side.run(main())


def test_of_many_concurrent_swaps_one_succeeds(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            stores = [await world.client() for _ in range(5)]
            won = await asyncio.gather(*(s.swap("leader", None, bytes([i])) for i, s in enumerate(stores)))
            assert sum(won) == 1
            assert await stores[0].get("leader") == bytes([won.index(True)])

    side.run(main())


def test_a_watch_yields_existing_keys_then_every_change_in_order(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            writer, reader = await world.client(), await world.client()
            await writer.put("nodes/1", b"b")
            await writer.put("nodes/0", b"a")
            watching = asyncio.create_task(seen(reader, "nodes/", 5))
            await watches_established(reader)
            await writer.put("nodes/0", b"x")
            await writer.put("epoch", b"not under the prefix")
            await writer.swap("nodes/0", b"x", b"y")
            await writer.put("nodes/0", b"y")
            assert await watching == [
                StoreChange("nodes/0", b"a"),
                StoreChange("nodes/1", b"b"),
                StoreChange("nodes/0", b"x"),
                StoreChange("nodes/0", b"y"),
                StoreChange("nodes/0", b"y"),
            ]

    side.run(main())


def test_a_key_that_is_deleted_is_gone_and_can_come_back(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            writer, reader = await world.client(), await world.client()
            await writer.put("nodes/0", b"a", session=True)
            watching = asyncio.create_task(seen(reader, "nodes/", 3))
            await watches_established(reader)
            await writer.delete("nodes/1")
            await writer.delete("nodes/0")
            assert await reader.get("nodes/0") is None
            assert await writer.swap("nodes/0", None, b"b")
            assert await watching == [
                StoreChange("nodes/0", b"a"),
                StoreChange("nodes/0", None),
                StoreChange("nodes/0", b"b"),
            ]
            await world.leave(writer)
            assert await reader.get("nodes/0") == b"b"  # it was put again, without a session

    side.run(main())


def test_session_keys_go_with_their_client_and_others_stay(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            node, other = await world.client(), await world.client()
            await node.put("nodes/3", b"here", session=True)
            assert await node.swap("leader", None, b"3", session=True)
            await node.put("result", b"done")
            await other.put("nodes/4", b"here too", session=True)
            await world.leave(node)
            await asyncio.gather(gone(other, "nodes/3"), gone(other, "leader"))
            assert await other.get("result") == b"done"
            assert await other.get("nodes/4") == b"here too"

    side.run(main())


def test_a_watch_sees_a_session_key_go(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            node, other = await world.client(), await world.client()
            await node.put("nodes/3", b"here", session=True)
            watching = asyncio.create_task(seen(other, "nodes/", 2))
            await watches_established(other)
            await world.leave(node)
            assert await watching == [StoreChange("nodes/3", b"here"), StoreChange("nodes/3", None)]

    side.run(main())


def test_a_key_belongs_to_the_session_that_wrote_it_last(side: Side | EtcdSide) -> None:
    async def main() -> None:
        async with side.world() as world:
            first, second, witness = [await world.client() for _ in range(3)]
            await first.put("lasting", b"1", session=True)
            await second.put("lasting", b"2")
            await first.put("taken over", b"1", session=True)
            await second.put("taken over", b"2", session=True)
            await first.put("mark", b"", session=True)
            await world.leave(first)
            await gone(witness, "mark")
            assert await witness.get("lasting") == b"2"
            assert await witness.get("taken over") == b"2"
            await world.leave(second)
            await gone(witness, "taken over")
            assert await witness.get("lasting") == b"2"

    side.run(main())


def test_a_closed_watch_leaves_no_listener(own: Side) -> None:
    async def main() -> None:
        async with own.world() as world:
            store = await world.client()
            await store.put("nodes/0", b"")
            for _ in range(3):
                await seen(store, "nodes/", 1)
            await store.get("nodes/0")  # the server has handled all earlier calls
            assert not world.store._listeners
            await store.put("nodes/0", b"")  # and late updates break nothing
            assert await store.get("nodes/0") == b""

    own.run(main())


def test_the_watches_of_a_disconnected_client_leave_no_listeners(far: Side) -> None:
    async def main() -> None:
        async with far.world() as world:
            node, other = await world.client(), await world.client()
            watching = asyncio.create_task(seen(node, "nodes/", 1))
            await asyncio.sleep(0)
            await node.put("mark", b"", session=True)
            assert len(world.store._listeners) == 1
            await world.leave(node)
            await gone(other, "mark")
            await other.get("mark")
            assert not world.store._listeners
            watching.cancel()

    far.run(main())


def test_an_answer_to_a_cancelled_call_is_ignored(far: Side) -> None:
    async def main() -> None:
        async with far.world() as world:
            store = await world.client()
            calls = [asyncio.create_task(store.get("x")) for _ in range(3)]
            await asyncio.sleep(0)
            for call in calls:
                call.cancel()
            await store.put("x", b"1")
            assert await store.get("x") == b"1"

    far.run(main())


def test_when_the_server_is_gone_calls_and_watches_fail_and_do_not_hang(far: Side) -> None:
    async def main() -> None:
        async with far.world() as world:
            store = await world.client()
            await store.put("x", b"1")
            watching = asyncio.create_task(seen(store, "x", 2))
            await watches_established(store)
            await world.end_server()
            asking = asyncio.create_task(store.get("x"))
            for waiting in (watching, asking):
                with pytest.raises(RunError, match="the connection to the store broke"):
                    await waiting
            for later in (store.get("x"), store.put("x", b""), store.swap("x", None, b""), seen(store, "x", 1)):
                with pytest.raises(RunError, match="the connection to the store broke"):
                    await later

    far.run(main())


def test_an_invalid_message_does_not_end_the_store_for_the_others(far: Side) -> None:
    async def main() -> None:
        async with far.world() as world:
            assert world.endpoint is not None
            assert world.server is not None
            stranger, store = world.endpoint(), await world.client()
            for body in (b"", b"\xff" * 9, b"\x81\xa4type\xa3get"):
                stranger.send_message(world.server.address, body)
            await store.put("x", b"1")
            assert await store.get("x") == b"1"
            await stranger.close()

    far.run(main())


Move = tuple[str, str, bytes | None, int]
moves: st.SearchStrategy[list[Move]] = st.lists(
    st.tuples(
        st.sampled_from(["put", "session", "swap", "end", "watch"]),
        st.sampled_from(["a", "a/b", "b"]),
        st.sampled_from([None, b"1", b"2"]),
        st.integers(0, 2),
    )
)


@given(moves)
def test_replaying_a_watch_gives_the_keys_of_the_store(script: list[Move]) -> None:
    """For any start of the watch, and any changes meanwhile."""
    store = MemoryStore()
    copies: list[tuple[str, dict[str, bytes]]] = []

    def watch(prefix: str) -> None:
        copy: dict[str, bytes] = {}
        copies.append((prefix, copy))

        def on_change(change: StoreChange) -> None:
            assert change.key.startswith(prefix)
            if change.value is None:
                del copy[change.key]  # only existing keys can be deleted
            else:
                copy[change.key] = change.value

        store.listen(prefix, on_change)

    watch("")
    for move, key, value, client in script:
        match move:
            case "put":
                store.write(key, value or b"")
            case "session":
                store.write(key, value or b"", f"client-{client}")
            case "swap":
                before = store.read(key)
                assert store.swap(key, value, b"new") == (before == value)
            case "end":
                store.end_session(f"client-{client}")
            case "watch":
                watch(key)
        for prefix, copy in copies:
            assert copy == {k: v for k, v in store._values.items() if k.startswith(prefix)}
