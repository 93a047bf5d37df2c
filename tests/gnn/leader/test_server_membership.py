"""Membership of servers in etcd: a server that hangs is replaced like one that ends, and is fenced when it wakes up."""

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
from tests.gnn.fake_worker import process_ends
from tests.gnn.run_folder import all_processes_ended, read_events
from tests.gnn.simulated_run import small_graph, small_model

from culm.cluster.store.etcd import EtcdAccess, EtcdStore
from culm.errors import RunError, UsageError
from culm.gnn import GnnCallbacks, GnnResult, train
from culm.gnn.leader.gnn_ledger import EpochLoss
from culm.gnn.server import gnn_run_store
from culm.gnn.server.gnn_run_store import connect_run_store, open_run_store, resolve_etcd_access
from culm.providers.private_etcd import PrivateEtcd

GRAPH = small_graph()
MODEL = small_model(GRAPH, dropout=0.4)
OPTIONS: dict[str, Any] = {"epochs": 16, "evaluate_every": 4, "checkpoint_every": 4, "servers": 2, "workers": 2}
TIMEOUT_S = 60.0


def run(**options: Any) -> GnnResult:
    return train(GRAPH, MODEL, threads=1, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def failure_free_result(forked_programs: None) -> GnnResult:
    return run()


class ServerPause:
    """Stops a server after an epoch and continues it when it has been replaced."""

    def __init__(self, folder: Path, server_id: str) -> None:
        self._folder, self._server_id = folder, server_id
        self._stopped = 0
        self.ended_by_itself = False

    def handle_epoch(self, done: EpochLoss, elapsed_s: float) -> None:
        ups = [e["pid"] for e in read_events(self._folder) if e["kind"] == "server-up" and e["node"] == self._server_id]
        if done.epoch >= 3 and not self._stopped:
            self._stopped = ups[0]
            os.kill(self._stopped, signal.SIGSTOP)
        elif len(ups) > 1 and not self.ended_by_itself:
            descriptor = os.pidfd_open(self._stopped)
            os.kill(self._stopped, signal.SIGCONT)
            self.ended_by_itself = bool(select.select([descriptor], [], [], TIMEOUT_S)[0])
            os.close(descriptor)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.waits(9)
@pytest.mark.parametrize("server_id", ["graph-1", "parameter-0"])
def test_a_server_that_hangs_is_replaced_and_fenced_when_it_wakes_up(
    server_id: str, failure_free_result: GnnResult, tmp_path: Path
) -> None:
    pause = ServerPause(tmp_path / "run", server_id)
    result = run(suspect_after=4.0, out=str(tmp_path / "run"), callbacks=GnnCallbacks(on_epoch=pause.handle_epoch))
    assert pause.ended_by_itself
    assert [server_id] in [recovery["lost"] for recovery in result.summary["recoveries"]]
    assert result.losses == failure_free_result.losses
    assert result.summary["weights_sha256"] == failure_free_result.summary["weights_sha256"]
    assert result.summary["samples_lost"] == result.summary["samples_duplicated"] == 0
    assert all_processes_ended(tmp_path / "run")


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_users_etcd_holds_the_run_and_is_empty_afterwards(failure_free_result: GnnResult, tmp_path: Path) -> None:
    seen: list[str] = []

    async def list_run_keys(access: EtcdAccess) -> list[str]:
        async with await EtcdStore.open(access, "witness", timeout_s=TIMEOUT_S) as store:
            return [key.decode() for key in await store._list_full_keys(b"culm/gnn-") if b"/key/" in key]

    with contextlib.closing(PrivateEtcd()) as private:
        asyncio.run(private.start())

        def handle_epoch(done: EpochLoss, elapsed_s: float) -> None:
            seen[:] = seen or ["asked", *_run_in_thread(list_run_keys, private.access)]

        result = run(etcd=private.access, out=str(tmp_path / "run"), callbacks=GnnCallbacks(on_epoch=handle_epoch))
        assert asyncio.run(list_run_keys(private.access)) == []
    assert {key.partition("/key/")[2] for key in seen} >= {
        "setup",
        "generation",
        "servers/graph-0",
        "servers/parameter-0",
    }
    assert [e["where"] for e in read_events(tmp_path / "run") if e["kind"] == "store"] == ["etcd"]
    assert result.losses == failure_free_result.losses


def _run_in_thread(
    list_run_keys: Callable[[EtcdAccess], Coroutine[Any, Any, list[str]]], access: EtcdAccess
) -> list[str]:
    """Run in a loop of another thread: the run's own loop is busy with the callback."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(list_run_keys(access))).result()


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_without_etcd_the_store_is_in_the_process_and_a_message_is_shown(
    failure_free_result: GnnResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def fail_to_start(*_: object) -> None:
        raise UsageError("there is no etcd on this machine")

    monkeypatch.setattr(PrivateEtcd, "start", fail_to_start)
    messages: list[str] = []
    result = run(
        kills=["server=1 epoch=9"], out=str(tmp_path / "run"), callbacks=GnnCallbacks(on_message=messages.append)
    )
    assert result.losses == failure_free_result.losses
    assert len(result.summary["recoveries"]) == 1
    assert any("servers that hang are not detected" in message for message in messages)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_server_reads_the_leaders_keys_and_its_own_end_with_its_session() -> None:
    async def scenario() -> list[bytes | None]:
        async with open_run_store(None, "r1", "secret", suspect_after=5.0, on_message=print) as run_store:
            await run_store.store.put("setup", b"words")
            async with connect_run_store(run_store.ticket) as store:
                await store.put("servers/graph-0", b"1", session=True)
                values = [await store.get("setup"), await run_store.store.get("servers/graph-0")]
            return [*values, await run_store.store.get("servers/graph-0")]

    assert asyncio.run(scenario()) == [b"words", b"1", None]


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_the_end_of_a_process_is_seen_before_and_after_it_ended() -> None:
    async def watch() -> int:
        process = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
        seen = asyncio.create_task(gnn_run_store.wait_until_process_ends(process.pid))
        process.kill()
        await asyncio.wait_for(seen, TIMEOUT_S)
        await process.wait()
        await asyncio.wait_for(gnn_run_store.wait_until_process_ends(process.pid), TIMEOUT_S)
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
def test_an_invalid_etcd_is_rejected_in_one_sentence(given: str | None, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_etcd_access(given, **options)
    assert sentence in str(refused.value)


def test_the_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULM_ETCD_PASSWORD", "word")
    assert resolve_etcd_access("https://here", user="me") == EtcdAccess(
        endpoints=("https://here:2379",), user="me", password="word"
    )


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_a_private_etcd_that_dies_is_restarted_without_changing_the_training(
    monkeypatch: pytest.MonkeyPatch, failure_free_result: GnnResult
) -> None:
    etcd_pids = started_etcds(monkeypatch)

    def handle_epoch(done: EpochLoss, elapsed_s: float) -> None:
        if done.epoch == 5:
            os.kill(etcd_pids[0], signal.SIGKILL)

    result = run(callbacks=GnnCallbacks(on_epoch=handle_epoch))
    assert len(set(etcd_pids)) == 2
    assert result.losses == failure_free_result.losses


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.waits(6)
def test_a_private_etcd_that_hangs_is_restarted_without_changing_the_training(
    monkeypatch: pytest.MonkeyPatch, failure_free_result: GnnResult, tmp_path: Path
) -> None:
    etcd_pids = started_etcds(monkeypatch)
    messages: list[str] = []

    def handle_epoch(done: EpochLoss, elapsed_s: float) -> None:
        if done.epoch == 5 and len(etcd_pids) == 1:
            os.kill(etcd_pids[0], signal.SIGSTOP)

    callbacks = GnnCallbacks(on_epoch=handle_epoch, on_message=messages.append)
    result = run(callbacks=callbacks, suspect_after=2.0, out=str(tmp_path / "run"))
    assert "the private etcd did not answer for 4 s: restarting it" in messages
    assert len(set(etcd_pids)) == 2
    assert process_ends(etcd_pids[0])
    assert result.losses == failure_free_result.losses
    assert all_processes_ended(tmp_path / "run")


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.waits(15)
def test_a_private_etcd_that_hangs_again_at_once_fails_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    etcd_pids = started_etcds(monkeypatch)

    def handle_epoch(done: EpochLoss, elapsed_s: float) -> None:
        if done.epoch == 5:
            os.kill(etcd_pids[0], signal.SIGSTOP)
            etcd_pids.hang = True

    with pytest.raises(RunError, match=r"^the private etcd does not answer for 4 s: is the disk full\?$"):
        run(callbacks=GnnCallbacks(on_epoch=handle_epoch), suspect_after=2.0, out=str(tmp_path / "run"))
    assert 2 <= len(etcd_pids) <= 3  # the second may answer in the moment before it is stopped
    assert all(map(process_ends, etcd_pids))
    assert all_processes_ended(tmp_path / "run")


class StartedEtcds(list[int]):
    """Process ids of the private etcds that were started. With `hang`, the next ones are stopped as soon as they
    answer."""

    hang = False


def started_etcds(monkeypatch: pytest.MonkeyPatch) -> StartedEtcds:
    etcd_pids, start = StartedEtcds(), PrivateEtcd.start

    async def started(etcd: PrivateEtcd) -> None:
        await start(etcd)
        etcd_pids.append(etcd.pid)
        if etcd_pids.hang:
            os.kill(etcd.pid, signal.SIGSTOP)

    monkeypatch.setattr(PrivateEtcd, "start", started)
    return etcd_pids
