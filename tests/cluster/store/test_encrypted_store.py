"""What a shared secret protects, and on what the machines of one job must agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from tests.cluster.store.versioned_memory import VersionedMemory
from tests.tiny_jobs import DATA, job

from culm.cluster.job_identity import check_identity, job_identity
from culm.cluster.store.encrypted_store import EncryptedStore, check_secret, connection_secret
from culm.cluster.store.etcd import parse_etcd_access
from culm.cluster.store.node_numbers import allocate_node_numbers
from culm.cluster.store.store import MemoryStore, StoreChange
from culm.errors import RunError, UsageError
from culm.providers.advertised_address import advertised_address

SECRET = b"sixteen bytes or more"


def stores(*secrets: bytes) -> tuple[VersionedMemory, list[EncryptedStore]]:
    """One store, bare and as seen by clients with a secret."""
    bare = VersionedMemory()
    return bare, [EncryptedStore(bare, secret, "job") for secret in secrets]


def test_only_clients_with_the_secret_read_values() -> None:
    async def main() -> None:
        bare, (ours, also, other) = stores(SECRET, SECRET, SECRET + b"!")
        await ours.put("epoch", b"the plan")
        assert await also.get("epoch") == b"the plan"
        assert b"plan" not in bare.values["epoch"].value
        with pytest.raises(RunError, match="'epoch' in the store was not written there by a client that knows the sec"):
            await other.get("epoch")

    asyncio.run(main())


def test_a_value_cannot_be_forged_nor_moved_to_another_key() -> None:
    async def main() -> None:
        bare, (ours,) = stores(SECRET)
        await ours.put("nodes/1", b"one")
        bare.overwrite("nodes/2", bare.values["nodes/1"].value)
        bare.overwrite("nodes/3", b"x")
        for key in ("nodes/2", "nodes/3"):
            with pytest.raises(RunError, match=key):
                await ours.get(key)
        with pytest.raises(RunError, match="nodes/2"):
            await _watched(ours, 2)

    asyncio.run(main())


@pytest.mark.parametrize("attack", ["written back", "deleted and written back", "created as often"])
def test_an_old_value_that_is_put_back_is_detected(attack: str) -> None:
    """By a client that has seen the newer value, and by one that has just come."""

    async def main() -> None:
        bare, (ours, newcomer) = stores(SECRET, SECRET)
        await ours.put("epoch", b"1")
        old = bare.values["epoch"]
        await ours.put("epoch", b"2")
        if attack != "written back":
            await bare.delete("epoch")
        if attack == "created as often":
            bare.overwrite("epoch", old.value)
            assert bare.values["epoch"].version.writes == old.version.writes - 1
        bare.overwrite("epoch", old.value)
        for client in (ours, newcomer):
            with pytest.raises(RunError, match=r"'epoch' .* or it is an old value that was put back"):
                await client.get("epoch")
            with pytest.raises(RunError, match="'epoch'"):
                await client.swap("epoch", b"1", b"3")
            with pytest.raises(RunError, match="'epoch'"):
                await _watched(client, 9)

    asyncio.run(main())


def test_a_value_of_an_earlier_run_is_detected() -> None:
    async def main() -> None:
        bare, (first, second) = stores(SECRET, SECRET)
        await first.put("setup", b"of the first run")
        old = bare.values["setup"].value
        await first.delete("setup")
        await second.put("setup", b"of the second run")
        bare.overwrite("setup", old)
        with pytest.raises(RunError, match="'setup'"):
            await second.get("setup")

    asyncio.run(main())


def test_a_key_that_was_created_and_not_written_yet_is_missing() -> None:
    """Its creator may be gone: another client completes it."""

    async def main() -> None:
        bare, (ours, also) = stores(SECRET, SECRET)
        bare.overwrite("leader", b"")
        assert await ours.get("leader") is None
        assert await ours.swap("leader", None, b"1")
        assert not await also.swap("leader", None, b"2")
        assert await _watched(also, 1) == [StoreChange("leader", b"1")]

    asyncio.run(main())


def test_clients_that_write_the_same_key_by_turns_see_the_last_value() -> None:
    async def main() -> None:
        _, (ours, also) = stores(SECRET, SECRET)
        for value in (b"1", b"2", b"3"):
            await ours.put("x", value)
            await also.put("x", value + b"!")
            assert await ours.get("x") == value + b"!"
        await asyncio.gather(*(client.put("y", b"z") for client in (ours, also, ours)))
        assert await also.get("y") == b"z"

    asyncio.run(main())


def test_a_swap_compares_the_plain_values() -> None:
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


def test_a_watch_decrypts_values_and_hides_the_marker() -> None:
    async def main() -> None:
        _, (ours,) = stores(SECRET)
        await ours.write_secret_marker()
        await ours.put("a", b"1")
        await ours.put("b", b"2")
        assert await _watched(ours, 2) == [StoreChange("a", b"1"), StoreChange("b", b"2")]

    asyncio.run(main())


async def _watched(store: EncryptedStore, count: int) -> list[StoreChange]:
    changes: AsyncGenerator[StoreChange, None] = store.watch("")
    found = [await anext(changes) for _ in range(count)]
    await changes.aclose()
    return found


def test_another_secret_is_refused() -> None:
    async def main() -> None:
        _, (ours, other) = stores(SECRET, SECRET + b"!")
        await other.check_secret_marker()  # nobody has begun yet
        await ours.write_secret_marker()
        await ours.check_secret_marker()
        with pytest.raises(UsageError, match="CULM_SECRET is not the secret of this job"):
            await other.check_secret_marker()

    asyncio.run(main())


def test_a_short_secret_is_refused() -> None:
    assert check_secret(SECRET) == SECRET
    with pytest.raises(UsageError, match="CULM_SECRET has 5 bytes: use at least 16"):
        check_secret(b"short")


def test_two_jobs_have_different_connection_secrets() -> None:
    assert connection_secret(SECRET, "a") != connection_secret(SECRET, "b")
    assert SECRET not in connection_secret(SECRET, "a")


def test_node_numbers_are_unique() -> None:
    async def main() -> None:
        store = MemoryStore()
        clients = [store.client(str(i)) for i in range(3)]
        given = await asyncio.gather(*(allocate_node_numbers(client, 2) for client in clients))
        assert sorted(n for numbers in given for n in numbers) == [0, 1, 2, 3, 4, 5]

    asyncio.run(main())


FILE = Path(__file__).parents[2] / "tiny_jobs.py"


def test_equal_machines_do_not_differ() -> None:
    mine = job_identity(job(exact=True), f"{FILE}:job")
    check_identity(mine, job_identity(job(exact=True), f"{FILE}:job"))
    assert {
        "culm",
        "python",
        "torch",
        "numpy",
        "file tiny_jobs.py",
        "layers",
        "batch",
        "data",
        "machine",
    } <= mine.keys()


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
def test_every_difference_is_named(difference: str, fields: dict[str, object]) -> None:
    jobs = job_identity(job(exact=True), str(FILE))
    with pytest.raises(UsageError, match="this machine cannot join: ") as refused:
        check_identity(job_identity(job(**{"exact": True, **fields}), str(FILE)), jobs)
    assert difference in str(refused.value)


def test_a_file_that_one_machine_lacks_is_named() -> None:
    with pytest.raises(UsageError, match=r"file a\.py is not there here and 12 in the job; make them the same"):
        check_identity({"torch": "1"}, {"file a.py": "12", "torch": "1"})


def test_other_versions_are_named_with_the_command_that_installs_them() -> None:
    with pytest.raises(UsageError, match=r"torch is 1 here and 2 in the job; install culm==0\.1 torch==2 here$"):
        check_identity({"culm": "0", "torch": "1", "numpy": "3"}, {"culm": "0.1", "torch": "2", "numpy": "3"})


def test_the_advertised_address_is_one_of_this_machine() -> None:
    access = parse_etcd_access("http://127.0.0.1:2379")
    assert advertised_address(None, access) == "127.0.0.1"
    assert advertised_address("127.0.0.1", access) == advertised_address("lo", access) == "127.0.0.1"


@pytest.mark.parametrize("asked", ["203.0.113.7", "no-such-interface", "::1"])
def test_a_foreign_address_is_refused_with_the_interfaces_of_this_machine(asked: str) -> None:
    with pytest.raises(UsageError, match=r"--address .*the interfaces are .*lo"):
        advertised_address(asked, parse_etcd_access("http://127.0.0.1:2379"))
