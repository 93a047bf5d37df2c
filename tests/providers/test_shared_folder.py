"""Machines of a run write to one folder: a machine that has another one is refused before it computes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from culm.cluster.store.store import MemoryStore
from culm.config import RunConfig
from culm.errors import UsageError
from culm.observe.writers.run_folder import check_folder_empty
from culm.providers.execute_run import find_resources
from culm.providers.shared_folder import check_shared_folder
from culm.providers.shared_run import SharedRun
from culm.testing.virtual_time import VirtualClock, run_virtual


def check(folders: list[str | None]) -> None:
    """What machines with these run folders do when they join one run, one after another."""

    async def main() -> None:
        keys, clock = MemoryStore(), VirtualClock()
        for number, folder in enumerate(folders):
            await check_shared_folder(keys.client(str(number)), folder, clock)

    run_virtual(main())


def test_machines_that_see_the_same_folder_join(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    check([str(tmp_path / "run"), str(tmp_path / "run"), str(tmp_path / "link")])
    assert len(list((tmp_path / "run").iterdir())) == 1
    check([str(tmp_path / "run")] * 2)  # a resumed run
    assert len(list((tmp_path / "run").iterdir())) == 1
    check_folder_empty(str(tmp_path / "run"))


def test_a_machine_with_a_folder_of_its_own_is_refused(tmp_path: Path) -> None:
    for other in ("missing", "earlier"):
        (tmp_path / "earlier").mkdir(exist_ok=True)
        (tmp_path / "earlier" / ".shared-0123").touch()
        with pytest.raises(UsageError, match=f"--out .*{other} is not the folder that the other machines write to"):
            check([str(tmp_path / "run"), str(tmp_path / other)])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        check([str(tmp_path / "file" / "run")])


def test_runs_without_a_folder_or_with_a_url_need_no_check() -> None:
    check([None, None, "s3://bucket/run"])


def test_machines_at_once_agree_on_one_file(tmp_path: Path) -> None:
    async def main() -> None:
        keys, clock = MemoryStore(), VirtualClock()
        joining = (check_shared_folder(keys.client(str(number)), str(tmp_path), clock) for number in range(5))
        await asyncio.gather(*joining)

    run_virtual(main())
    assert len(list(tmp_path.iterdir())) == 1


def test_other_machines_get_the_whole_path_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedRun.__new__(SharedRun)
    monkeypatch.setattr("culm.providers.execute_run.find_shared_run", lambda *_: shared)
    monkeypatch.chdir(tmp_path)
    config = find_resources(RunConfig(nodes=2, join="culm1-x", out="runs/a")).config
    assert config.out == str(tmp_path / "runs" / "a")
    config = find_resources(RunConfig(nodes=2, join="culm1-x", resume="runs/a")).config
    assert (config.out, config.resume) == (str(tmp_path / "runs" / "a"),) * 2
