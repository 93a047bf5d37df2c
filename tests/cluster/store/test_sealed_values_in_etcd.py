"""Sealed values in a real etcd, whose counters decide which value is the current one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import aclosing

import pytest
from tests.etcd_servers import patiently

from culm.cluster.store.encrypted_store import EncryptedStore
from culm.cluster.store.etcd import EtcdStore
from culm.cluster.store.store import StoreChange
from culm.errors import RunError
from culm.providers.private_etcd import PrivateEtcd

pytestmark = pytest.mark.real
SECRET = b"sixteen bytes or more"
LARGE = bytes(range(256)) * 5000


@pytest.fixture
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@pytest.mark.parametrize("value", [b"of the last epoch", LARGE], ids=["small", "large"])
def test_an_old_value_that_a_client_of_etcd_writes_back_is_detected(etcd: PrivateEtcd, value: bytes) -> None:
    """In place, and after deleting the key, so that the number of writes is the same again."""

    async def main() -> None:
        async with (
            await EtcdStore.open(etcd.access, "job") as one,
            await EtcdStore.open(etcd.access, "job") as attacker,
        ):
            ours = EncryptedStore(one, SECRET, "job")
            await ours.put("epoch", value)
            old = await attacker.get("epoch")
            assert old is not None
            await ours.put("epoch", b"of this epoch")
            for deletes_first in (False, True):
                if deletes_first:
                    await attacker.delete("epoch")
                    await attacker.put("epoch", b"")
                await attacker.put("epoch", old)
                with pytest.raises(RunError, match="an old value that was put back"):
                    await EncryptedStore(one, SECRET, "job").get("epoch")
                await attacker.delete("epoch")
                await ours.put("epoch", b"of this epoch")
            assert await ours.get("epoch") == b"of this epoch"

    patiently(main())


def test_clients_share_sealed_values_of_any_size_and_leave_no_parts_behind(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as one, await EtcdStore.open(etcd.access, "job") as other:
            ours, theirs = EncryptedStore(one, SECRET, "job"), EncryptedStore(other, SECRET, "job")
            async with aclosing(theirs.watch("")) as changes:
                assert await ours.swap("plan", None, LARGE)
                assert await anext(changes) == StoreChange("plan", LARGE)
                assert not await theirs.swap("plan", None, b"mine")
                assert await theirs.swap("plan", LARGE, b"small")
                assert await anext(changes) == StoreChange("plan", b"small")
                await ours.delete("plan")
                assert await anext(changes) == StoreChange("plan", None)
            assert not await one._list_full_keys(b"culm/job/blob/")

    patiently(main())


def test_a_sealed_key_of_a_session_ends_with_it(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as one:
            async with await EtcdStore.open(etcd.access, "job") as other:
                await EncryptedStore(other, SECRET, "job").put("nodes/1", b"here", session=True)
                assert await EncryptedStore(one, SECRET, "job").get("nodes/1") == b"here"
            assert await one.get("nodes/1") is None

    patiently(main())
