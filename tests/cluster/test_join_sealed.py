"""What a shared secret protects, and what machines of one job must agree on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from culm.cluster.etcd import parse_access
from culm.cluster.identity import check_identity, identity
from culm.cluster.members import take_numbers
from culm.cluster.sealed import SealedStore, check_secret, wire_secret
from culm.cluster.store import Change, MemoryStore, StoreClient
from culm.errors import RunError, UsageError
from culm.providers.address import own_address

from .jobs import DATA, job

SECRET = b"sixteen bytes or more"


class Evicting(StoreClient):
    """A store in memory that knows how to evict."""

    async def evict(self, key: str) -> bool:
        found = await self.get(key) is not None
        await self.delete(key)
        return found


def stores(*secrets: bytes) -> tuple[Evicting, list[SealedStore]]:
    """One store, bare and as those see it who know a secret."""
    bare = Evicting(MemoryStore(), "test")
    return bare, [SealedStore(bare, secret, "job") for secret in secrets]


def test_who_knows_the_secret_reads_what_was_written_and_nobody_else_does() -> None:
    async def main() -> None:
        bare, (ours, also, other) = stores(SECRET, SECRET, SECRET + b"!")
        await ours.put("epoch", b"the plan")
        assert await also.get("epoch") == b"the plan"
        assert b"plan" not in (await bare.get("epoch") or b"")
        with pytest.raises(RunError, match="'epoch' in the store was not written by somebody who knows the secret"):
            await other.get("epoch")

    asyncio.run(main())


def test_a_value_can_not_be_forged_nor_moved_to_another_key() -> None:
    async def main() -> None:
        bare, (ours,) = stores(SECRET)
        await ours.put("nodes/1", b"one")
        await bare.put("nodes/2", await bare.get("nodes/1") or b"")
        await bare.put("nodes/3", b"x")
        for key in ("nodes/2", "nodes/3"):
            with pytest.raises(RunError, match=key):
                await ours.get(key)
        with pytest.raises(RunError, match="nodes/2"):
            await _watched(ours, 2)

    asyncio.run(main())


def test_a_swap_compares_what_was_meant_though_all_values_are_sealed() -> None:
    async def main() -> None:
        _, (ours, also) = stores(SECRET, SECRET)
        assert await ours.swap("epoch", None, b"1")
        assert not await also.swap("epoch", None, b"2")
        assert await also.swap("epoch", b"1", b"2")
        assert not await ours.swap("epoch", b"1", b"3")
        assert await ours.evict("epoch")
        assert await also.get("epoch") is None
        await ours.put("x", b"")
        await ours.delete("x")
        assert await also.get("x") is None

    asyncio.run(main())


def test_a_watch_tells_values_open_and_keeps_the_mark_to_itself() -> None:
    async def main() -> None:
        _, (ours,) = stores(SECRET)
        await ours.sign()
        await ours.put("a", b"1")
        await ours.put("b", b"2")
        assert await _watched(ours, 2) == [Change("a", b"1"), Change("b", b"2")]

    asyncio.run(main())


async def _watched(store: SealedStore, count: int) -> list[Change]:
    changes: AsyncGenerator[Change, None] = store.watch("")
    found = [await anext(changes) for _ in range(count)]
    await changes.aclose()
    return found


def test_another_secret_is_refused_before_anything_is_asked() -> None:
    async def main() -> None:
        _, (ours, other) = stores(SECRET, SECRET + b"!")
        await other.check()  # nobody has begun yet
        await ours.sign()
        await ours.check()
        with pytest.raises(UsageError, match="CULM_SECRET is not the secret of this job"):
            await other.check()

    asyncio.run(main())


def test_a_secret_that_is_too_short_is_none() -> None:
    assert check_secret(SECRET) == SECRET
    with pytest.raises(UsageError, match="CULM_SECRET has 5 bytes: use at least 16"):
        check_secret(b"short")


def test_connections_of_two_jobs_prove_different_things() -> None:
    assert wire_secret(SECRET, "a") != wire_secret(SECRET, "b")
    assert SECRET not in wire_secret(SECRET, "a")


def test_no_number_is_given_twice() -> None:
    async def main() -> None:
        store = MemoryStore()
        clients = [store.client(str(i)) for i in range(3)]
        given = await asyncio.gather(*(take_numbers(client, 2) for client in clients))
        assert sorted(n for numbers in given for n in numbers) == [0, 1, 2, 3, 4, 5]

    asyncio.run(main())


FILE = Path(__file__).with_name("jobs.py")


def test_a_machine_agrees_with_itself() -> None:
    mine = identity(job(exact=True), f"{FILE}:job")
    check_identity(mine, identity(job(exact=True), f"{FILE}:job"))
    assert {"culm", "python", "torch", "numpy", "file jobs.py", "layers", "batch", "data", "machine"} <= mine.keys()


@pytest.mark.parametrize(
    ("difference", "fields"),
    [
        ("layers is 3 ", {"layers": job().layers[:3]}),
        ("batch is 4 in", {"global_batch": 4}),
        ("seed 1", {"seed": 1}),
        ("data is 31 items", {"data": DATA[:31]}),
        ("data is 32 items", {"data": DATA[::-1]}),
        ("machine is cpu here and torch", {"exact": False}),
    ],
)
def test_whatever_differs_is_named(difference: str, fields: dict[str, object]) -> None:
    jobs = identity(job(exact=True), str(FILE))
    with pytest.raises(UsageError, match="this machine can not join: ") as refused:
        check_identity(identity(job(**{"exact": True, **fields}), str(FILE)), jobs)
    assert difference in str(refused.value)


def test_a_file_that_one_machine_lacks_is_named() -> None:
    with pytest.raises(UsageError, match=r"file a\.py is not there here and 12 in the job; torch is 1 here and 2 in"):
        check_identity({"torch": "1"}, {"file a.py": "12", "torch": "2"})


def test_an_address_is_that_which_etcd_sees_or_one_of_this_machine() -> None:
    access = parse_access("http://127.0.0.1:2379")
    assert own_address(None, access) == "127.0.0.1"
    assert own_address("127.0.0.1", access) == own_address("lo", access) == "127.0.0.1"


@pytest.mark.parametrize("asked", ["203.0.113.7", "no-such-interface", "::1"])
def test_an_address_of_somebody_else_is_refused_with_the_interfaces_of_this_machine(asked: str) -> None:
    with pytest.raises(UsageError, match=r"--address .*the interfaces are .*lo"):
        own_address(asked, parse_access("http://127.0.0.1:2379"))
