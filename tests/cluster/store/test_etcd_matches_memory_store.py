"""For every script, the store in etcd and the one in memory give the same answers and the same changes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.etcd_servers import patiently

from culm.cluster.store.etcd import EtcdStore
from culm.cluster.store.store import MemoryStore, Store, StoreChange
from culm.providers.private_etcd import PrivateEtcd

pytestmark = pytest.mark.real
KEYS = ["a", "a/b", "b"]
END = StoreChange("a/~end", b"")
Move = tuple[str, str, bytes | None, int]
moves: st.SearchStrategy[list[Move]] = st.lists(
    st.tuples(
        st.sampled_from(["put", "session", "swap", "swap session", "delete", "leave", "watch"]),
        st.sampled_from(KEYS),
        st.sampled_from([None, b"", b"1", b"2"]),
        st.integers(0, 1),
    ),
    max_size=20,
)
_jobs = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@dataclass
class Memory:
    """Two clients of a store in memory."""

    store: MemoryStore = field(default_factory=MemoryStore)
    names: list[int] = field(default_factory=lambda: [0, 1])

    def client(self, number: int) -> Store:
        return self.store.client(str(self.names[number]))

    async def leave(self, number: int) -> None:
        self.store.end_session(str(self.names[number]))
        self.names[number] += 2


@dataclass
class Etcd:
    """Two clients of a job in etcd."""

    etcd: PrivateEtcd
    job: str = field(default_factory=lambda: f"job-{next(_jobs)}")
    stores: dict[int, EtcdStore] = field(default_factory=dict)

    async def open(self) -> None:
        for number in (0, 1):
            self.stores[number] = await EtcdStore.open(self.etcd.access, self.job)

    def client(self, number: int) -> Store:
        return self.stores[number]

    async def leave(self, number: int) -> None:
        await self.stores[number].close()
        self.stores[number] = await EtcdStore.open(self.etcd.access, self.job)

    async def close(self) -> None:
        for store in self.stores.values():
            await store.close()


async def follow(store: Store, prefix: str) -> list[StoreChange]:
    """The changes of a watch until the end of the script."""
    changes: list[StoreChange] = []
    async with aclosing(store.watch(prefix)) as stream:
        async for change in stream:
            changes.append(change)
            if change == END:
                break
    return changes


async def play(
    world: Memory | Etcd, witness: Store, script: list[Move]
) -> tuple[list[object], list[list[StoreChange]]]:
    """The answers, and the changes of each watch. Watches belong to a client that never leaves."""
    answers: list[object] = []
    watches: list[asyncio.Task[list[StoreChange]]] = []
    for move, key, value, number in script:
        client = world.client(number)
        match move:
            case "put" | "session":
                await client.put(key, value or b"", session=move == "session")
            case "swap" | "swap session":
                answers.append(await client.swap(key, value, b"new", session=move == "swap session"))
            case "delete":
                await client.delete(key)
            case "leave":
                await world.leave(number)
            case "watch":
                watches.append(asyncio.create_task(follow(witness, "a")))
                await asyncio.sleep(0)
        answers.append([await witness.get(key) for key in KEYS])
    await witness.put(END.key, END.value or b"")
    return answers, [await watch for watch in watches]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=moves)
def test_both_stores_agree_on_every_script(etcd: PrivateEtcd, script: list[Move]) -> None:
    async def main() -> None:
        memory, far = Memory(), Etcd(etcd)
        await far.open()
        async with await EtcdStore.open(etcd.access, far.job) as witness:
            expected = await play(memory, memory.store.client("witness"), script)
            assert await play(far, witness, script) == expected
        await far.close()

    patiently(main())
