"""The pure parts of the store over etcd: watch state, large values in parts, ends of prefixes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.etcd_servers import patiently

from culm.cluster.store.etcd import EtcdStore, large_values
from culm.cluster.store.etcd.etcd_messages import EtcdEvent, KeyValue, prefix_end
from culm.cluster.store.etcd.watch_state import WatchState
from culm.cluster.store.store import StoreChange, VersionedChange
from culm.errors import UsageError
from culm.providers.private_etcd import PrivateEtcd

History = list[tuple[str, bool]]
histories = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.booleans()), max_size=30)
"""Keys that are put (True) or deleted, one per revision."""


def happened(history: History) -> list[EtcdEvent]:
    """The events that etcd reports: deleting a missing key is no event."""
    existing: set[str] = set()
    events = []
    for revision, (key, put) in enumerate(history, start=1):
        if put or key in existing:
            kv = KeyValue(f"home/{key}".encode(), str(revision).encode() if put else b"", revision)
            events.append(EtcdEvent(kv, "PUT" if put else "DELETE"))
        (existing.add if put else existing.discard)(key)
    return events


def listing(events: list[EtcdEvent]) -> list[KeyValue]:
    """The keys that exist after all events."""
    last = {event.kv.key: event for event in events}
    return [event.kv for event in last.values() if event.value is not None]


def plain(changes: list[VersionedChange]) -> list[StoreChange]:
    """The changes without versions."""
    return [change for change, _ in changes]


def replayed(changes: list[StoreChange]) -> dict[str, bytes]:
    """What a watcher knows; deletions are only delivered for existing keys."""
    known: dict[str, bytes] = {}
    for key, value in changes:
        if value is None:
            del known[key]
        else:
            known[key] = value
    return known


@given(histories, st.data())
def test_an_interrupted_watch_delivers_every_event_once(history: History, data: st.DataObject) -> None:
    events = happened(history)
    watch_state, delivered = WatchState("home/"), list[StoreChange]()
    while watch_state.revision < (events[-1].kv.mod_revision if events else 0):
        again = data.draw(st.integers(0, watch_state.revision))  # a server may repeat what it has sent
        rest = [event for event in events if event.kv.mod_revision > again]
        delivered += plain(watch_state.new_changes(rest[: data.draw(st.integers(1, len(rest)))]))
    assert delivered == [StoreChange(event.kv.key.decode().removeprefix("home/"), event.value) for event in events]


@given(histories, histories)
def test_after_a_compaction_the_watcher_knows_all_keys(before: History, meanwhile: History) -> None:
    events = happened(before + meanwhile)
    watch_state = WatchState("home/")
    delivered = plain(watch_state.new_changes([event for event in events if event.kv.mod_revision <= len(before)]))
    delivered += plain(watch_state.diff_with_listing(len(before + meanwhile), listing(events)))
    assert replayed(delivered) == {kv.key.decode().removeprefix("home/"): kv.value for kv in listing(events)}
    assert watch_state.diff_with_listing(len(before + meanwhile), listing(events)) == []


def test_all_events_of_a_transaction_are_delivered() -> None:
    both = [EtcdEvent(KeyValue(f"home/{key}".encode(), b"", 5)) for key in "ab"]
    assert plain(WatchState("home/").new_changes(both)) == [StoreChange("a", b""), StoreChange("b", b"")]


@given(st.binary(min_size=1), st.binary())
def test_the_end_of_a_prefix_is_after_all_keys_with_it(start: bytes, rest: bytes) -> None:
    prefix = b"culm/" + start
    end = prefix_end(prefix)
    assert prefix + rest < end
    assert not end.startswith(prefix)


@given(st.integers(0, 4), st.integers(-1, 1))
def test_a_large_value_is_complete_or_missing(parts: int, more: int) -> None:
    data = bytes(max(0, parts * 2**20 + more))
    name = large_values.content_hash(data)
    written = list(large_values.split_into_parts("home/", name, data))
    assert [key for key, _ in written] == sorted(key for key, _ in written)
    assert all(len(value) <= 2**20 for _, value in written)
    assert all(key.startswith(large_values.key_prefix("home/", name)) for key, _ in written)
    assert large_values.join_parts(name, [value for _, value in written]) == data
    assert large_values.join_parts(name, [value for _, value in written][:-1]) is None or not data


def test_a_value_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_values, "MAX_LARGE_VALUE_BYTES", 10)
    with pytest.raises(UsageError, match="a value of 11 bytes is too large for the store: it takes 10"):
        large_values.content_hash(bytes(11))


@pytest.mark.parametrize("value", [b"", b"small", bytes(large_values.MAX_INLINE_BYTES)])
def test_small_values_are_stored_under_their_key(value: bytes) -> None:
    assert large_values.pointer_or_value(value) == value
    assert large_values.pointer_target(large_values.pointer_or_value(value)) is None


@pytest.mark.parametrize(
    "value",
    [bytes(large_values.MAX_INLINE_BYTES + 1), large_values.pointer_or_value(bytes(large_values.MAX_INLINE_BYTES + 1))],
)
def test_large_values_and_lookalikes_of_pointers_are_stored_in_parts(value: bytes) -> None:
    assert large_values.pointer_target(large_values.pointer_or_value(value)) == large_values.content_hash(value)


@pytest.fixture
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@pytest.mark.real
def test_values_of_any_size_are_swapped_and_watched_and_leave_nothing_behind(etcd: PrivateEtcd) -> None:
    """A plan for a thousand workers is larger than etcd's request limit."""
    plans = [bytes(range(256)) * 10_000, bytes(4 * 2**20), b"small", bytes(3 * 2**20)]

    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as one, await EtcdStore.open(etcd.access, "job") as other:
            async with aclosing(other.watch("epoch")) as changes:
                for old, new in pairwise([None, *plans]):
                    assert new is not None
                    assert not await one.swap("epoch", b"another", new)
                    assert await one.swap("epoch", old, new)
                    assert await anext(changes) == StoreChange("epoch", new)
                    assert await other.get("epoch") == new
            left = await one._list_full_keys(large_values.key_prefix("culm/job/"))
            newest = large_values.key_prefix("culm/job/", large_values.content_hash(plans[-1]))
            assert left
            assert all(key.startswith(newest) for key in left)

    patiently(main())


@pytest.mark.real
def test_deleting_a_job_removes_all_its_keys_and_no_others(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as one, await EtcdStore.open(etcd.access, "job-2") as other:
            for store in (one, other):
                await store.put("a", b"1")
                await store.put("b", b"2", session=True)
            await one.put("plan", bytes(2**20))
            await one.delete_all()
            assert [await one.get("a"), await one.get("b"), await one.get("plan")] == [None, None, None]
            assert [await other.get("a"), await other.get("b")] == [b"1", b"2"]
            await other.delete_all()
        async with await EtcdStore.open(etcd.access, "witness") as witness:
            assert await witness._list_full_keys(b"culm/job") == []

    patiently(main())


@pytest.mark.real
def test_a_watch_of_more_keys_than_one_page_sees_all_of_them(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as store:
            for i in range(7):
                await store.put(f"n/{i}", b"")
            _, found = await store._list_key_values(store._full_key("n/"), page=3)
            assert [kv.key for kv in found] == [store._full_key(f"n/{i}") for i in range(7)]

    patiently(main())
