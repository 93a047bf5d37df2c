"""etcd goes and comes back, lines break and fall silent: nothing is missed, repeated, or written by the dead."""

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

import pytest

from culm.cluster.etcd import Access, EtcdStore, wire
from culm.cluster.etcd.refusals import Unreachable
from culm.cluster.etcd.wire import Anything, TxnAnswer
from culm.cluster.store import Change, Store
from culm.cluster.timeouts import derive
from culm.errors import RunError, UsageError
from culm.providers.etcd import PrivateEtcd, _free_port

from .etcds import BadLine, bad_line, etcd_with, patiently, started

pytestmark = [pytest.mark.real, pytest.mark.waits(1)]
SHORT = derive(0.5)
"""Leases of two seconds, the shortest there are."""
LOST = "the session in the store is lost"


@pytest.fixture
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@asynccontextmanager
async def clients(etcd: PrivateEtcd, count: int, line: BadLine | None = None) -> AsyncIterator[list[EtcdStore]]:
    """Clients of one job; through a line if there is one."""
    access = etcd.access
    if line is not None:
        access = type(access)(endpoints=(line.url,), user=access.user, password=access.password)
    stores = [await EtcdStore.open(access, "job", timeouts=SHORT) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def collect(store: Store, prefix: str, found: list[Change], last: Change) -> None:
    """Note the changes of a watch until one of them comes."""
    async with aclosing(store.watch(prefix)) as changes:
        async for change in changes:
            found.append(change)
            if change == last:
                return


async def until_there(found: list[Change], count: int) -> None:
    while len(found) < count:
        await asyncio.sleep(0.01)


async def gone(store: Store, key: str) -> None:
    found: list[Change] = []
    await collect(store, key, found, Change(key, None))


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
            found: list[Change] = []
            watching = asyncio.create_task(collect(reader, "n/", found, Change("n/~end", b"")))
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
            once = [Change("n/0", None), Change("n/0", b"0")]
            each = [[Change(f"n/{i}", b"a"), Change(f"n/{i}", b"b"), *once] for i in range(1, 4)]
            assert found == [Change("n/0", b"0"), *(change for round in each for change in round), found[-1]]

    patiently(main())


def test_a_session_outlives_an_outage_that_is_longer_than_its_lease(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with clients(etcd, 2) as (node, other):
            await node.put("nodes/1", b"here", session=True)
            etcd.kill()
            await asyncio.wait([asyncio.create_task(node.lost())], timeout=SHORT.lease + 0.5)
            await etcd.start()
            await node.put("mark", b"")
            assert await other.get("nodes/1") == b"here"
            await node.close()
            assert await other.get("nodes/1") is None

    patiently(main())


def test_writes_over_a_line_that_keeps_breaking_happen_exactly_once(etcd: PrivateEtcd) -> None:
    """Answers are lost after etcd has done what was asked: to ask again must not do it again."""
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
            found: list[Change] = []
            watching = asyncio.create_task(collect(other, "x", found, Change("x", b"end")))
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
            assert LOST in str(await node.lost())
            for waiting in (watching, writing, node.get("epoch"), node.put("x", b""), gone(node, "x")):
                with pytest.raises(RunError, match=LOST):
                    await waiting
            assert await other.get("epoch") == b"1"

    patiently(main())


def test_a_silence_that_is_shorter_than_the_lease_goes_unnoticed(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with (
            bad_line(etcd.access.endpoints[0]) as line,
            clients(etcd, 1) as (other,),
            clients(etcd, 1, line) as (node,),
        ):
            await node.put("nodes/1", b"here", session=True)
            found: list[Change] = []
            watching = asyncio.create_task(collect(node, "epoch", found, Change("epoch", b"2")))
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


def test_a_slow_line_costs_nobody_his_session(etcd: PrivateEtcd) -> None:
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
            access = Access(endpoints=(line.url, *known.endpoints), user=known.user, password=known.password)
            async with await EtcdStore.open(access, "job", timeouts=SHORT) as reader:
                await writer.put("x", b"1")
                stream = reader._gateway.stream("/v3/watch", {"create_request": {"key": b"x"}})
                line.fall_silent()
                with pytest.raises(Unreachable, match="did not answer in time"):
                    await anext(stream)
                found: list[Change] = []
                await collect(reader, "x", found, Change("x", b"1"))

    patiently(main())


def test_who_is_evicted_can_write_nothing_even_before_he_hears_of_it(etcd: PrivateEtcd) -> None:
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
            assert LOST in str(await node.lost())

    patiently(main())


def test_a_write_that_comes_through_after_a_later_one_is_void(etcd: PrivateEtcd) -> None:
    """It was given up, but etcd had it already, or a router somewhere."""

    async def main() -> None:
        async with clients(etcd, 1) as (store,):
            session = store._session
            late = wire.once(session.marker, f"{1:016x}", session.lease, [], [wire.put(store._key("x"), b"old")])
            await store.put("y", b"")
            await store.put("x", b"new")
            answer = await store._gateway.call("/v3/kv/txn", late, TxnAnswer)
            assert wire.outcome(answer, f"{1:016x}") is None
            assert await store.get("x") == b"new"

    patiently(main())


def test_a_call_that_is_given_up_does_not_hold_up_the_next_one(etcd: PrivateEtcd) -> None:
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


def test_nobody_believes_an_etcd_that_has_lost_its_data(tmp_path: Path) -> None:
    async def main() -> None:
        port = _free_port()
        with etcd_with(tmp_path / "one", port=port) as url:
            store = await EtcdStore.open(Access(endpoints=(url,)), "job", timeouts=SHORT)
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


def test_a_watch_whose_past_was_compacted_away_tells_the_difference(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with (
            bad_line(etcd.access.endpoints[0]) as line,
            clients(etcd, 1) as (writer,),
            clients(etcd, 1, line) as (reader,),
        ):
            await writer.put("n/gone", b"")
            await writer.put("n/same", b"")
            await writer.put("n/new", b"old")
            found: list[Change] = []
            watching = asyncio.create_task(collect(reader, "n/", found, Change("n/~end", b"")))
            await until_there(found, 3)
            line.fall_silent()
            line.cut()
            for i in range(5):
                await writer.put("n/new", str(i).encode())
            await writer.delete("n/gone")
            await writer.put("mark", b"")
            compact = {"revision": str(writer._gateway._revision), "physical": True}
            await writer._gateway.call("/v3/kv/compaction", compact, Anything)
            line.heal()
            await writer.put("n/~end", b"")
            await watching
            assert found[3:] == [Change("n/gone", None), Change("n/new", b"4"), Change("n/~end", b"")]

    patiently(main())


@contextmanager
def three_members(folder: Path) -> Iterator[tuple[list[str], list[subprocess.Popen[bytes]]]]:
    """A real cluster: addresses and processes."""
    clients = [f"http://127.0.0.1:{_free_port()}" for _ in range(3)]
    peers = [f"http://127.0.0.1:{_free_port()}" for _ in range(3)]
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
def test_when_a_member_of_etcd_dies_or_falls_silent_calls_and_watches_go_on_at_another(
    tmp_path: Path, end: signal.Signals
) -> None:
    async def main(urls: list[str], members: list[subprocess.Popen[bytes]]) -> None:
        async with (
            await EtcdStore.open(Access(endpoints=tuple(urls)), "job", timeouts=derive(3), patience_s=30) as node,
            await EtcdStore.open(
                Access(endpoints=tuple(urls[::-1])), "job", timeouts=derive(3), patience_s=30
            ) as other,
        ):
            found: list[Change] = []
            watching = asyncio.create_task(collect(node, "n/", found, Change("n/~end", b"")))
            await node.put("n/1", b"", session=True)
            await until_there(found, 1)
            members[urls.index(node._gateway.endpoint)].send_signal(end)
            await node.put("n/2", b"")
            await other.put("n/~end", b"")
            await watching
            assert found == [Change("n/1", b""), Change("n/2", b""), Change("n/~end", b"")]
            assert await other.get("n/1") == b""

    with three_members(tmp_path) as (urls, members):
        patiently(main(urls, members))


def test_an_etcd_without_a_majority_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    async def main(urls: list[str], members: list[subprocess.Popen[bytes]]) -> None:
        async with await EtcdStore.open(Access(endpoints=tuple(urls)), "job", patience_s=30):
            pass
        for member in members[1:]:
            member.kill()
        with pytest.raises(UsageError, match="answers but takes no writes: are most members up"):
            await EtcdStore.open(Access(endpoints=tuple(urls)), "job", timeouts=SHORT, patience_s=0.5)

    with three_members(tmp_path) as (urls, members):
        patiently(main(urls, members))
