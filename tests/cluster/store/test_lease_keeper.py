"""A blocked event loop keeps its lease for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import pytest
from tests.etcd_servers import patiently

from culm.cluster.store.etcd import EtcdStore
from culm.cluster.timeouts import derive_timeouts
from culm.errors import RunError
from culm.providers.private_etcd import PrivateEtcd

pytestmark = [pytest.mark.real, pytest.mark.waits(6)]


@pytest.fixture(scope="module")
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


def test_a_loop_that_is_blocked_for_longer_than_its_lease_keeps_its_session(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "blocked", timeouts=derive_timeouts(0.5)) as store:
            await store.put("nodes/0", b"here", session=True)
            time.sleep(2 * derive_timeouts(0.5).lease + 1)
            assert await store.get("nodes/0") == b"here"
            await store.put("nodes/0", b"still here")

    patiently(main())


def test_a_loop_that_makes_no_progress_for_too_long_loses_its_session(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        times = derive_timeouts(0.5, blocked_after=1.0)
        async with await EtcdStore.open(etcd.access, "hung", timeouts=times) as store:
            await store.put("nodes/0", b"here", session=True)
            time.sleep(times.blocked + 2 * times.lease + 1)
            with pytest.raises(RunError, match="the session in the store is lost"):
                await store.put("nodes/0", b"still here")

    patiently(main())
