"""The pure parts of the store over etcd: what a watch has told, large values in parts, the ends of prefixes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cluster.etcd import EtcdStore, blob
from culm.cluster.etcd.mirror import Mirror
from culm.cluster.etcd.wire import Event, KeyValue, prefix_end
from culm.cluster.store import Change
from culm.errors import UsageError
from culm.providers.etcd import PrivateEtcd

from .etcds import patiently

History = list[tuple[str, bool]]
histories = st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.booleans()), max_size=30)
"""Keys that are put (True) or deleted, one a revision."""


def happened(history: History) -> list[Event]:
    """As etcd tells it: to delete what is not there is no event."""
    there: set[str] = set()
    events = []
    for revision, (key, put) in enumerate(history, start=1):
        if put or key in there:
            kv = KeyValue(f"home/{key}".encode(), str(revision).encode() if put else b"", revision)
            events.append(Event(kv, "PUT" if put else "DELETE"))
        (there.add if put else there.discard)(key)
    return events


def standing(events: list[Event]) -> list[KeyValue]:
    """What is there after all of it."""
    last = {event.kv.key: event for event in events}
    return [event.kv for event in last.values() if event.value is not None]


def replayed(changes: list[Change]) -> dict[str, bytes]:
    """What a listener knows; that something goes is told only of what was there."""
    known: dict[str, bytes] = {}
    for key, value in changes:
        if value is None:
            del known[key]
        else:
            known[key] = value
    return known


@given(histories, st.data())
def test_a_watch_that_breaks_anywhere_and_goes_on_tells_every_event_once(history: History, data: st.DataObject) -> None:
    events = happened(history)
    mirror, told = Mirror("home/"), list[Change]()
    while mirror.revision < (events[-1].kv.mod_revision if events else 0):
        again = data.draw(st.integers(0, mirror.revision))  # a server may repeat what it sent before
        rest = [event for event in events if event.kv.mod_revision > again]
        told += mirror.apply(rest[: data.draw(st.integers(1, len(rest)))])
    assert told == [Change(event.kv.key.decode().removeprefix("home/"), event.value) for event in events]


@given(histories, histories)
def test_after_a_compaction_the_listener_knows_what_is_there(before: History, meanwhile: History) -> None:
    events = happened(before + meanwhile)
    mirror = Mirror("home/")
    told = mirror.apply([event for event in events if event.kv.mod_revision <= len(before)])
    told += mirror.settle(len(before + meanwhile), standing(events))
    assert replayed(told) == {kv.key.decode().removeprefix("home/"): kv.value for kv in standing(events)}
    assert mirror.settle(len(before + meanwhile), standing(events)) == []


def test_the_events_of_one_transaction_are_all_told() -> None:
    both = [Event(KeyValue(f"home/{key}".encode(), b"", 5)) for key in "ab"]
    assert Mirror("home/").apply(both) == [Change("a", b""), Change("b", b"")]


@given(st.binary(min_size=1), st.binary())
def test_the_end_of_a_prefix_is_after_all_that_begin_with_it(start: bytes, rest: bytes) -> None:
    prefix = b"culm/" + start
    end = prefix_end(prefix)
    assert prefix + rest < end
    assert not end.startswith(prefix)


@given(st.integers(0, 4), st.integers(-1, 1))
def test_a_blob_is_whole_or_not_there(parts: int, more: int) -> None:
    data = bytes(max(0, parts * 2**20 + more))
    name = blob.name(data)
    written = list(blob.split("home/", name, data))
    assert [key for key, _ in written] == sorted(key for key, _ in written)
    assert all(len(value) <= 2**20 for _, value in written)
    assert {blob.name_of("home/", key) for key, _ in written} == {name}
    assert blob.join(name, [value for _, value in written]) == data
    assert blob.join(name, [value for _, value in written][:-1]) is None or not data


def test_a_value_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob, "MAX_BLOB", 10)
    with pytest.raises(UsageError, match="a value of 11 bytes is too large for the store: it takes 10"):
        blob.name(bytes(11))


@pytest.mark.parametrize("value", [b"", b"small", bytes(blob.LARGEST_VALUE)])
def test_what_fits_under_a_key_lies_there(value: bytes) -> None:
    assert blob.pointer(value) == value
    assert blob.pointed(blob.pointer(value)) is None


@pytest.mark.parametrize("value", [bytes(blob.LARGEST_VALUE + 1), blob.pointer(bytes(blob.LARGEST_VALUE + 1))])
def test_what_is_large_or_looks_like_a_pointer_lies_in_a_blob(value: bytes) -> None:
    assert blob.pointed(blob.pointer(value)) == blob.name(value)


@pytest.fixture
def etcd() -> Iterator[PrivateEtcd]:
    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())
        yield private


@pytest.mark.real
def test_values_of_any_size_are_swapped_and_watched_and_leave_nothing_behind(etcd: PrivateEtcd) -> None:
    """A plan for a thousand workers is larger than what etcd takes."""
    plans = [bytes(range(256)) * 10_000, bytes(4 * 2**20), b"small", bytes(3 * 2**20)]

    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as one, await EtcdStore.open(etcd.access, "job") as other:
            async with aclosing(other.watch("epoch")) as changes:
                for old, new in pairwise([None, *plans]):
                    assert new is not None
                    assert not await one.swap("epoch", b"another", new)
                    assert await one.swap("epoch", old, new)
                    assert await anext(changes) == Change("epoch", new)
                    assert await other.get("epoch") == new
            left = {blob.name_of("culm/job/", key) for key in await one._keys(blob.folder("culm/job/"))}
            assert left == {blob.name(plans[-1])}

    patiently(main())


@pytest.mark.real
def test_a_job_that_is_erased_leaves_nothing_and_touches_no_other(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as one, await EtcdStore.open(etcd.access, "job-2") as other:
            for store in (one, other):
                await store.put("a", b"1")
                await store.put("b", b"2", session=True)
            await one.put("plan", bytes(2**20))
            await one.erase()
            assert [await one.get("a"), await one.get("b"), await one.get("plan")] == [None, None, None]
            assert [await other.get("a"), await other.get("b")] == [b"1", b"2"]
            await other.erase()
        async with await EtcdStore.open(etcd.access, "witness") as witness:
            assert await witness._keys(b"culm/job") == []

    patiently(main())


@pytest.mark.real
def test_a_watch_of_more_keys_than_one_answer_holds_sees_all_of_them(etcd: PrivateEtcd) -> None:
    async def main() -> None:
        async with await EtcdStore.open(etcd.access, "job") as store:
            for i in range(7):
                await store.put(f"n/{i}", b"")
            _, found = await store._list(store._key("n/"), page=3)
            assert [kv.key for kv in found] == [store._key(f"n/{i}") for i in range(7)]

    patiently(main())
