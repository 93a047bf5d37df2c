"""Outages of etcd and of connections to it: nothing is missed, repeated, or written by a fenced client."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_servers import BadLine, bad_line, etcd_with, patiently, started

from culm.cluster.store.etcd import EtcdAccess, EtcdStore, etcd_messages
from culm.cluster.store.etcd.etcd_errors import EtcdUnreachable
from culm.cluster.store.etcd.etcd_gateway import EtcdGateway
from culm.cluster.store.etcd.etcd_messages import EmptyAnswer, TxnAnswer
from culm.cluster.store.store import Store, StoreChange
from culm.cluster.timeouts import derive_timeouts
from culm.errors import RunError, UsageError
from culm.providers.private_etcd import PrivateEtcd, free_port

pytestmark = [pytest.mark.real, pytest.mark.waits(1)]
SHORT = derive_timeouts(0.5)
"""Leases of two seconds, the shortest possible."""
LOST = "the session in the store is lost"


@pytest.fixture
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@asynccontextmanager
async def clients(etcd: PrivateEtcd, count: int, line: BadLine | None = None) -> AsyncIterator[list[EtcdStore]]:
    """Clients of one job, through a bad line if there is one."""
    access = etcd.access
    if line is not None:
        access = type(access)(endpoints=(line.url,), user=access.user, password=access.password)
    stores = [await EtcdStore.open(access, "job", timeouts=SHORT) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def collect(store: Store, prefix: str, found: list[StoreChange], last: StoreChange) -> None:
    """Record the changes of a watch until a given one arrives."""
    async with aclosing(store.watch(prefix)) as changes:
        async for change in changes:
            found.append(change)
            if change == last:
                return


async def until_there(found: list[StoreChange], count: int) -> None:
    while len(found) < count:
        await asyncio.sleep(0.01)


async def gone(store: Store, key: str) -> None:
    found: list[StoreChange] = []
    await collect(store, key, found, StoreChange(key, None))


def test_calls_wait_for_an_etcd_that_was_killed_and_go_on_when_it_is_back(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with clients(etcd, 2) as (one, other):
            await one.put("x", b"1")
            etcd.kill()
            calls = [
                asyncio.create_task(call)
                for call in (one.get("x"), one.swap("x", b"1", b"2"), other.put("y", b"3"), other.get("y"))
            ]
            await asyncio.wait(calls, timeout=0.3)
            assert not any(call.done() for call in calls)
            await etcd.start()
            assert [await call for call in calls] == [b"1", True, None, b"3"]
            assert await other.get("x") == b"2"

    patiently(main())


def test_a_watch_misses_and_repeats_nothing_over_a_restart(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with clients(etcd, 2) as (writer, reader):
            found: list[StoreChange] = []
            watching = asyncio.create_task(collect(reader, "n/", found, StoreChange("n/~end", b"")))
            await writer.put("n/0", b"0")
            await until_there(found, 1)
            for i in range(1, 4):
                etcd.kill()
                writing = asyncio.create_task(writer.put(f"n/{i}", b"a"))
                await etcd.start()
                await writing
                await writer.put(f"n/{i}", b"b")
                await writer.delete("n/0")
                await writer.put("n/0", b"0")
            await writer.put("n/~end", b"")
            await watching
            once = [StoreChange("n/0", None), StoreChange("n/0", b"0")]
            each = [[StoreChange(f"n/{i}", b"a"), StoreChange(f"n/{i}", b"b"), *once] for i in range(1, 4)]
            assert found == [StoreChange("n/0", b"0"), *(change for round in each for change in round), found[-1]]

    patiently(main())


def test_a_session_outlives_an_outage_that_is_longer_than_its_lease(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with clients(etcd, 2) as (node, other):
            await node.put("nodes/1", b"here", session=True)
            etcd.kill()
            await asyncio.wait([asyncio.create_task(node.wait_until_fenced())], timeout=SHORT.lease + 0.5)
            await etcd.start()
            await node.put("mark", b"")
            assert await other.get("nodes/1") == b"here"
            await node.close()
            assert await other.get("nodes/1") is None

    patiently(main())


def test_writes_over_a_line_that_keeps_breaking_happen_exactly_once(etcd: PrivateEtcd) -> None:
    """Answers are lost after etcd has executed the request: a retry must not execute it again."""
    chance = random.Random(7)

    async def main() -> None:
        async with bad_line(etcd.access.endpoints[0]) as line, clients(etcd, 1) as (witness,):
            async with clients(etcd, 2, line) as stores:
                line.keep_answer = lambda _: chance.random() > 0.2
                won = await asyncio.gather(*(count_up(store, 25) for store in stores))
                line.keep_answer = lambda _: True
            assert await witness.get("count") == str(sum(won)).encode()
            assert sum(won) >= 25

    async def count_up(store: EtcdStore, times: int) -> int:
        won = 0
        for _ in range(times):
            old = await store.get("count")
            won += await store.swap("count", old, str(int(old or b"0") + 1).encode())
        return won

    patiently(main())


def test_a_put_that_was_sent_twice_does_not_undo_what_came_between(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with (
            bad_line(etcd.access.endpoints[0]) as line,
            clients(etcd, 1) as (other,),
            clients(etcd, 1, line) as (store,),
        ):
            found: list[StoreChange] = []
            watching = asyncio.create_task(collect(other, "x", found, StoreChange("x", b"end")))
            line.keep_answer = lambda _: False
            putting = asyncio.create_task(store.put("x", b"first"))
            await until_there(found, 1)
            await other.put("x", b"second")
            line.keep_answer = lambda _: True
            await putting
            assert await other.get("x") == b"second"
            await other.put("x", b"end")
            await watching
            assert [value for _, value in found] == [b"first", b"second", b"end"]

    patiently(main())


def test_a_node_behind_a_line_that_was_silent_for_longer_than_its_lease_is_fenced(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with (
            bad_line(etcd.access.endpoints[0]) as line,
            clients(etcd, 1) as (other,),
            clients(etcd, 1, line) as (node,),
        ):
            await node.put("nodes/1", b"here", session=True)
            await node.put("epoch", b"1")
            watching = asyncio.create_task(gone(node, "never"))
            going = asyncio.create_task(gone(other, "nodes/1"))
            line.fall_silent()
            writing = asyncio.create_task(node.swap("epoch", b"1", b"2 of the old leader"))
            await going
            line.heal()
            assert LOST in str(await node.wait_until_fenced())
            for waiting in (watching, writing, node.get("epoch"), node.put("x", b""), gone(node, "x")):
                with pytest.raises(RunError, match=LOST):
                    await waiting
            assert await other.get("epoch") == b"1"

    patiently(main())


def test_a_pause_that_is_shorter_than_the_lease_has_no_effect(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with (
            bad_line(etcd.access.endpoints[0]) as line,
            clients(etcd, 1) as (other,),
            clients(etcd, 1, line) as (node,),
        ):
            await node.put("nodes/1", b"here", session=True)
            found: list[StoreChange] = []
            watching = asyncio.create_task(collect(node, "epoch", found, StoreChange("epoch", b"2")))
            await other.put("epoch", b"0")
            await until_there(found, 1)
            line.fall_silent()
            await other.put("epoch", b"1")
            await asyncio.wait([watching], timeout=0.3)
            line.heal()
            await other.put("epoch", b"2")
            await watching
            assert [value for _, value in found] == [b"0", b"1", b"2"]
            assert await other.get("nodes/1") == b"here"

    patiently(main())


def test_a_slow_line_costs_no_client_its_session(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with (
            bad_line(etcd.access.endpoints[0]) as line,
            clients(etcd, 1) as (other,),
            clients(etcd, 1, line) as (node,),
        ):
            line.delay_s = 0.2
            began = asyncio.get_running_loop().time()
            await node.put("nodes/1", b"here", session=True)
            while asyncio.get_running_loop().time() < began + 1.2 * SHORT.lease:
                await node.put("x", b"")
            assert await other.get("nodes/1") == b"here"
            line.delay_s = 0.0

    patiently(main())


def test_a_watch_that_begins_at_a_silent_endpoint_does_not_wait_there(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with bad_line(etcd.access.endpoints[0]) as line, clients(etcd, 1) as (writer,):
            known = etcd.access
            access = EtcdAccess(endpoints=(line.url, *known.endpoints), user=known.user, password=known.password)
            async with await EtcdStore.open(access, "job", timeouts=SHORT) as reader:
                await writer.put("x", b"1")
                stream = reader._gateway.stream("/v3/watch", {"create_request": {"key": b"x"}})
                line.fall_silent()
                with pytest.raises(EtcdUnreachable, match="did not answer in time"):
                    await anext(stream)
                found: list[StoreChange] = []
                await collect(reader, "x", found, StoreChange("x", b"1"))

    patiently(main())


def test_a_lease_that_expires_before_its_first_use_is_replaced(
    etcd: PrivateEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that freezes while a node opens its session."""
    leases: list[int] = []
    call = EtcdGateway.call

    async def expiring(gateway: EtcdGateway, path: str, body: Any, kind: Any) -> Any:
        answer = await call(gateway, path, body, kind)
        if path == "/v3/lease/grant":
            leases.append(answer.id)
            if len(leases) == 1:
                await call(gateway, "/v3/lease/revoke", {"ID": str(answer.id)}, EmptyAnswer)
        return answer

    monkeypatch.setattr(EtcdGateway, "call", expiring)

    async def main() -> None:
        async with clients(etcd, 1) as (node,):
            await node.put("nodes/1", b"here", session=True)
            assert await node.get("nodes/1") == b"here"

    patiently(main())
    assert len(leases) == 2


def test_an_evicted_client_cannot_write_even_before_it_is_notified(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with clients(etcd, 2) as (node, leader):
            await node.put("nodes/1", b"", session=True)
            await node.put("more", b"", session=True)
            assert await leader.evict("nodes/1")
            assert not await leader.evict("nodes/1")
            assert await leader.get("more") is None
            with pytest.raises(RunError, match=LOST):
                await node.put("x", b"of a dead one")
            assert await leader.get("x") is None
            assert LOST in str(await node.wait_until_fenced())

    patiently(main())


def test_a_write_overtaken_by_a_later_one_has_no_effect(etcd: PrivateEtcd) -> None:
    """The client cancelled it, but etcd or a router had received it."""

    async def main() -> None:
        async with clients(etcd, 1) as (store,):
            session = store._session
            late = etcd_messages.write_once_transaction(
                session.marker_key,
                f"{1:016x}",
                session.lease,
                [],
                [etcd_messages.put_operation(store._full_key("x"), b"old")],
            )
            await store.put("y", b"")
            await store.put("x", b"new")
            answer = await store._gateway.call("/v3/kv/txn", late, TxnAnswer)
            assert etcd_messages.write_once_outcome(answer, f"{1:016x}") is None
            assert await store.get("x") == b"new"

    patiently(main())


def test_a_cancelled_call_does_not_block_the_next_one(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with bad_line(etcd.access.endpoints[0]) as line, clients(etcd, 1, line) as (store,):
            line.fall_silent()
            for call in (store.put("x", b"old"), store.get("x"), gone(store, "x")):
                asking = asyncio.create_task(call)
                await asyncio.wait([asking], timeout=0.05)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            line.heal()
            await store.put("x", b"new")
            assert await store.get("x") == b"new"

    patiently(main())


def test_an_etcd_that_has_lost_its_data_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        port = free_port()
        with etcd_with(tmp_path / "one", port=port) as url:
            store = await EtcdStore.open(EtcdAccess(endpoints=(url,)), "job", timeouts=SHORT)
            for i in range(20):
                await store.put("epoch", str(i).encode())
        with etcd_with(tmp_path / "another", port=port), pytest.raises(RunError, match="etcd went back from revision"):
            await store.get("epoch")
        await store.close()

    patiently(main())


def test_an_etcd_that_has_lost_its_users_too_is_not_waited_for(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with clients(etcd, 1) as (store,):
            await store.put("epoch", b"1")
            etcd.kill()
            shutil.rmtree(etcd.folder / "data")
            await etcd.start()
            with pytest.raises(RunError, match="etcd"):
                await store.get("epoch")

    patiently(main())


def test_a_watch_after_a_compaction_yields_the_difference(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with (
            bad_line(etcd.access.endpoints[0]) as line,
            clients(etcd, 1) as (writer,),
            clients(etcd, 1, line) as (reader,),
        ):
            await writer.put("n/gone", b"")
            await writer.put("n/same", b"")
            await writer.put("n/new", b"old")
            found: list[StoreChange] = []
            watching = asyncio.create_task(collect(reader, "n/", found, StoreChange("n/~end", b"")))
            await until_there(found, 3)
            line.fall_silent()
            line.cut()
            for i in range(5):
                await writer.put("n/new", str(i).encode())
            await writer.delete("n/gone")
            await writer.put("mark", b"")
            compact = {"revision": str(writer._gateway._revision), "physical": True}
            await writer._gateway.call("/v3/kv/compaction", compact, EmptyAnswer)
            line.heal()
            await writer.put("n/~end", b"")
            await watching
            assert found[3:] == [StoreChange("n/gone", None), StoreChange("n/new", b"4"), StoreChange("n/~end", b"")]

    patiently(main())


@contextmanager
def three_members(folder: Path) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """A real cluster of three members: addresses and processes."""
    clients = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
    peers = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
    everybody = ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))
    with contextlib.ExitStack() as stack:
        members = [
            stack.enter_context(
                started(
                    f"--name=m{i}",
                    f"--data-dir={folder / str(i)}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={everybody}",
                    "--heartbeat-interval=50",
                    "--election-timeout=500",
                )
            )
            for i, (client, peer) in enumerate(zip(clients, peers, strict=True))
        ]
        yield clients, members


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_calls_and_watches_continue_at_another_member_when_one_ends_or_hangs(
    tmp_path: Path, end: signal.Signals
) -> None:
    async def main(urls: list[str], members: list[subprocess.Popen[bytes]]) -> None:
        async with (
            await EtcdStore.open(
                EtcdAccess(endpoints=tuple(urls)), "job", timeouts=derive_timeouts(3), timeout_s=30
            ) as node,
            await EtcdStore.open(
                EtcdAccess(endpoints=tuple(urls[::-1])), "job", timeouts=derive_timeouts(3), timeout_s=30
            ) as other,
        ):
            found: list[StoreChange] = []
            watching = asyncio.create_task(collect(node, "n/", found, StoreChange("n/~end", b"")))
            await node.put("n/1", b"", session=True)
            await until_there(found, 1)
            members[urls.index(node._gateway.endpoint)].send_signal(end)
            await node.put("n/2", b"")
            await other.put("n/~end", b"")
            await watching
            assert found == [StoreChange("n/1", b""), StoreChange("n/2", b""), StoreChange("n/~end", b"")]
            assert await other.get("n/1") == b""

    with three_members(tmp_path) as (urls, members):
        patiently(main(urls, members))


def test_an_etcd_without_a_majority_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    async def main(urls: list[str], members: list[subprocess.Popen[bytes]]) -> None:
        async with await EtcdStore.open(EtcdAccess(endpoints=tuple(urls)), "job", timeout_s=30):
            pass
        for member in members[1:]:
            member.kill()
        with pytest.raises(UsageError, match="answers but takes no writes: are most members up"):
            await EtcdStore.open(EtcdAccess(endpoints=tuple(urls)), "job", timeouts=SHORT, timeout_s=0.5)

    with three_members(tmp_path) as (urls, members):
        patiently(main(urls, members))


def test_a_client_that_replaces_its_session_keeps_its_keys_and_its_watches(etcd: PrivateEtcd) -> None:
    """As a launcher whose etcd stood still."""

    async def main() -> None:
        async with clients(etcd, 1) as (other,):
            launcher = await EtcdStore.open(etcd.access, "job", timeouts=SHORT, replaces_session=True)
            try:
                await launcher.put("launcher", b"here", session=True)
                async with aclosing(launcher.watch("step")) as steps:
                    await other.put("step", b"1")
                    assert (await anext(steps)).value == b"1"
                    assert await other.evict("launcher")
                    assert await other.get("launcher") is None
                    await launcher.put("gate", b"2")
                    assert await other.get("launcher") == b"here"
                    assert await other.get("gate") == b"2"
                    await other.put("step", b"2")
                    assert (await anext(steps)).value == b"2"
            finally:
                await launcher.close()
            assert await other.get("launcher") is None

    patiently(main())


def test_a_client_that_opens_another_session_notices_that_etcd_has_lost_its_data(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with clients(etcd, 1) as (store,):
            for number in range(3):
                await store.put("step", str(number).encode())
            seen = store.seen_revision
        with pytest.raises(RunError, match=f"etcd went back from revision {seen + 1000} to .* --resume"):
            again = await EtcdStore.open(etcd.access, "job", timeouts=SHORT, seen_revision=seen + 1000)
            await again.get("step")

    patiently(main())
