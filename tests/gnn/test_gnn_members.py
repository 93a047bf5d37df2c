"""Servers meet in etcd: one that hangs is given up like one that ends, and changes nothing when it wakes up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.gnn.folder import events, nobody_left
from tests.gnn.house import small_graph, small_model
from tests.gnn.launch_standin import ended

from culm.cluster.etcd import Access, EtcdStore
from culm.errors import RunError, UsageError
from culm.gnn import Result, Watcher, meeting, train
from culm.gnn.ledger import Epoch
from culm.gnn.meeting import access_of, attend, meet
from culm.providers.etcd import PrivateEtcd

GRAPH = small_graph()
MODEL = small_model(GRAPH, dropout=0.4)
BRIEF: dict[str, Any] = {"epochs": 16, "evaluate_every": 4, "checkpoint_every": 4, "servers": 2, "workers": 2}
PATIENCE_S = 60.0


def run(**options: Any) -> Result:
    return train(GRAPH, MODEL, threads=1, **{**BRIEF, **options})


@pytest.fixture(scope="module")
def calm(forked: None) -> Result:
    return run()


class Pause:
    """Stops a server after an epoch, and wakes it up when others have gone on without it."""

    def __init__(self, folder: Path, seat: str) -> None:
        self._folder, self._seat = folder, seat
        self._stopped = 0
        self.ended_by_itself = False

    def heard(self, done: Epoch, at: float) -> None:
        ups = [e["pid"] for e in events(self._folder) if e["kind"] == "server-up" and e["node"] == self._seat]
        if done.epoch >= 3 and not self._stopped:
            self._stopped = ups[0]
            os.kill(self._stopped, signal.SIGSTOP)
        elif len(ups) > 1 and not self.ended_by_itself:
            descriptor = os.pidfd_open(self._stopped)
            os.kill(self._stopped, signal.SIGCONT)
            self.ended_by_itself = bool(select.select([descriptor], [], [], PATIENCE_S)[0])
            os.close(descriptor)


@pytest.mark.usefixtures("forked")
@pytest.mark.real
@pytest.mark.waits(9)
@pytest.mark.parametrize("seat", ["graph-1", "parameter-0"])
def test_a_server_that_hangs_is_replaced_and_fenced_when_it_wakes_up(seat: str, calm: Result, tmp_path: Path) -> None:
    pause = Pause(tmp_path / "run", seat)
    result = run(suspect_after=4.0, out=str(tmp_path / "run"), watcher=Watcher(epoch=pause.heard))
    assert pause.ended_by_itself
    assert [seat] in [recovery["lost"] for recovery in result.summary["recoveries"]]
    assert result.losses == calm.losses
    assert result.summary["weights_sha256"] == calm.summary["weights_sha256"]
    assert result.summary["samples_lost"] == result.summary["samples_duplicated"] == 0
    assert nobody_left(tmp_path / "run")


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_servers_meet_in_an_etcd_of_ones_own_and_leave_nothing_there(calm: Result, tmp_path: Path) -> None:
    seen: list[str] = []

    async def look(access: Access) -> list[str]:
        async with await EtcdStore.open(access, "witness", patience_s=PATIENCE_S) as store:
            return [key.decode() for key in await store._keys(b"culm/gnn-") if b"/key/" in key]

    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())

        def heard(done: Epoch, at: float) -> None:
            seen[:] = seen or ["asked", *_elsewhere(look, private.access)]

        result = run(etcd=private.access, out=str(tmp_path / "run"), watcher=Watcher(epoch=heard))
        assert asyncio.run(look(private.access)) == []
    assert {key.partition("/key/")[2] for key in seen} >= {"setup", "generation", "seats/graph-0", "seats/parameter-0"}
    assert [e["where"] for e in events(tmp_path / "run") if e["kind"] == "store"] == ["etcd"]
    assert result.losses == calm.losses


def _elsewhere(look: Callable[[Access], Coroutine[Any, Any, list[str]]], access: Access) -> list[str]:
    """In a loop of its own: the run's is busy with calling us."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(look(access))).result()


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_without_an_etcd_the_store_lives_in_the_process_and_that_is_said(
    calm: Result, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def none(*_: object) -> None:
        raise UsageError("there is no etcd on this machine")

    monkeypatch.setattr(PrivateEtcd, "start", none)
    said: list[str] = []
    result = run(kills=["server=1 epoch=9"], out=str(tmp_path / "run"), watcher=Watcher(told=said.append))
    assert result.losses == calm.losses
    assert len(result.summary["recoveries"]) == 1
    assert any("a server that hangs is not noticed" in sentence for sentence in said)


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_a_server_reads_what_the_leader_wrote_and_is_gone_when_it_leaves() -> None:
    async def both() -> list[bytes | None]:
        async with meet(None, "r1", "secret", suspect_after=5.0, said=print) as hall:
            await hall.store.put("setup", b"words")
            async with attend(hall.ticket) as store:
                await store.put("seats/graph-0", b"1", session=True)
                found = [await store.get("setup"), await hall.store.get("seats/graph-0")]
            return [*found, await hall.store.get("seats/graph-0")]

    assert asyncio.run(both()) == [b"words", b"1", None]


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_the_end_of_a_process_is_seen_whether_it_is_watched_before_or_after() -> None:
    async def watch() -> int:
        process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        seen = asyncio.create_task(meeting.ended(process.pid))
        process.kill()
        await asyncio.wait_for(seen, PATIENCE_S)
        await process.wait()
        await asyncio.wait_for(meeting.ended(process.pid), PATIENCE_S)
        return process.pid

    assert asyncio.run(watch()) > 0


@pytest.mark.parametrize(
    ("given", "options", "sentence"),
    [
        ("ftp://somewhere", {}, "--etcd has the endpoint 'ftp://somewhere'"),
        (None, {"user": "me"}, "--etcd is missing"),
        ("http://here:2379", {"cert": "c.pem"}, "--etcd-key is missing"),
    ],
)
def test_a_wrong_etcd_is_refused_in_one_sentence(given: str | None, options: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        access_of(given, **options)
    assert sentence in str(refused.value)


def test_the_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULM_ETCD_PASSWORD", "word")
    assert access_of("http://here", user="me") == Access(endpoints=("http://here:2379",), user="me", password="word")


@pytest.mark.usefixtures("forked")
@pytest.mark.real
def test_a_private_etcd_that_dies_is_started_again_and_nothing_is_learned_differently(
    monkeypatch: pytest.MonkeyPatch, calm: Result
) -> None:
    stores = started_etcds(monkeypatch)

    def heard(done: Epoch, at: float) -> None:
        if done.epoch == 5:
            os.kill(stores[0], signal.SIGKILL)

    result = run(watcher=Watcher(epoch=heard))
    assert len(set(stores)) == 2
    assert result.losses == calm.losses


@pytest.mark.usefixtures("forked")
@pytest.mark.real
@pytest.mark.waits(6)
def test_a_private_etcd_that_hangs_is_replaced_and_nothing_is_learned_differently(
    monkeypatch: pytest.MonkeyPatch, calm: Result, tmp_path: Path
) -> None:
    stores = started_etcds(monkeypatch)
    said: list[str] = []

    def heard(done: Epoch, at: float) -> None:
        if done.epoch == 5 and len(stores) == 1:
            os.kill(stores[0], signal.SIGSTOP)

    watcher = Watcher(epoch=heard, told=said.append)
    result = run(watcher=watcher, suspect_after=2.0, out=str(tmp_path / "run"))
    assert "the private etcd did not answer for 4 s: it is started again" in said
    assert len(set(stores)) == 2
    assert ended(stores[0])
    assert result.losses == calm.losses
    assert nobody_left(tmp_path / "run")


@pytest.mark.usefixtures("forked")
@pytest.mark.real
@pytest.mark.waits(15)
def test_a_private_etcd_that_hangs_again_at_once_ends_the_run_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stores = started_etcds(monkeypatch)

    def heard(done: Epoch, at: float) -> None:
        if done.epoch == 5:
            os.kill(stores[0], signal.SIGSTOP)
            stores.hang = True

    with pytest.raises(RunError, match=r"^the private etcd does not answer for 4 s: is the disk full\?$"):
        run(watcher=Watcher(epoch=heard), suspect_after=2.0, out=str(tmp_path / "run"))
    assert 2 <= len(stores) <= 3  # the second may answer in the moment before it is stopped
    assert all(map(ended, stores))
    assert nobody_left(tmp_path / "run")


class Etcds(list[int]):
    """Process ids of the private etcds that were started. `hang`: the next ones stop as soon as they answer."""

    hang = False


def started_etcds(monkeypatch: pytest.MonkeyPatch) -> Etcds:
    stores, start = Etcds(), PrivateEtcd.start

    async def started(etcd: PrivateEtcd) -> None:
        await start(etcd)
        stores.append(etcd.pid)
        if stores.hang:
            os.kill(etcd.pid, signal.SIGSTOP)

    monkeypatch.setattr(PrivateEtcd, "start", started)
    return stores
