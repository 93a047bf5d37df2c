"""Storage that fails for a while delays checkpoints and lines; only a limit of the user, or the end of the run, ends
the run."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_jobs import job

from culm.checkpoint import CheckpointCatalog, Storage
from culm.cluster.leader.output import line_buffer
from culm.cluster.leader.output.line_buffer import LineBuffer
from culm.errors import CheckpointError, RunError
from culm.observe.writers.run_folder import RunFolder
from culm.runtime.clock import RealClock
from culm.runtime.storage_retry import retry_storage
from culm.testing import Cluster, Faults
from culm.testing import simulate as simulate_any

simulate = functools.partial(simulate_any, strategy="none", stages=2, cost=lambda *_: 0.05)
STEPS = 8


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(folder, "events.jsonl") if event["kind"] == kind]


def steps_in(folder: Path) -> list[int]:
    return [line["step"] for line in lines(folder, "steps.jsonl")]


def failing(times: int, error: Exception, real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises this many times and then works."""
    left = [times]

    def call(*arguments: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error
        return real(*arguments, **options)

    return call


@pytest.fixture(params=["unavailable", "full disk", "503"])
def fault(request: pytest.FixtureRequest) -> Exception:
    """An error of a checkpoint storage."""
    found: Exception = {
        "unavailable": FileNotFoundError(errno.ENOENT, "No such file or directory"),
        "full disk": OSError(errno.ENOSPC, "No space left on device"),
        "503": ConnectionError("503 Slow Down"),
    }[request.param]
    return found


@pytest.mark.parametrize("method", ["write", "size"], ids=["shard", "commit"])
def test_a_checkpoint_storage_that_fails_for_a_moment_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, method: str
) -> None:
    failure_free = simulate(job(steps=STEPS))
    translated = CheckpointError(f"could not {method}: {fault}")
    monkeypatch.setattr(Storage, method, failing(2, translated, getattr(Storage, method)))
    monkeypatch.setattr(RunFolder, "open", lambda *_: None)  # only the checkpoints fail
    found = simulate(job(steps=STEPS), out=str(tmp_path), checkpoint_every=4)
    assert found.weights_sha256 == failure_free.weights_sha256
    assert found.summary["checkpoints"][-1] == STEPS
    CheckpointCatalog(Storage(tmp_path / "checkpoints")).check(STEPS)


def test_a_full_disk_is_an_event_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full from the fourth step until the seventh: the checkpoint of step 8 is made."""
    real = os.write
    full = [False]

    def write(descriptor: int, data: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(3)
        full[0] = True
        await cluster.wait_until_committed(7)
        full[0] = False

    monkeypatch.setattr(os, "write", write)
    found = simulate(job(steps=STEPS), out=str(tmp_path), checkpoint_every=2, script=script)
    assert found.summary["checkpoints"][-1] == STEPS
    (failed,) = events(tmp_path, "storage_failed")
    assert failed["path"] == f"{tmp_path}/checkpoints"
    assert "the disk is full" in failed["why"]
    assert failed["delayed"] in ("the checkpoint of step 2", "the checkpoint of step 4")
    (recovered,) = events(tmp_path, "storage_recovered")
    assert recovered["path"] == failed["path"]
    assert {4, 6} & set(recovered["skipped_checkpoints"])
    assert steps_in(tmp_path) == list(range(STEPS))


def test_a_write_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    """A disk of one node takes minutes: training goes on meanwhile, and the last checkpoint waits for it."""
    hangs = Faults().slow_disk(1, seconds=100.0)
    found = simulate(job(steps=STEPS), faults=hangs, out=str(tmp_path), checkpoint_every=2)
    assert found.summary["checkpoints"][-1] == STEPS
    failed, *_ = events(tmp_path, "storage_failed")
    assert "has not answered for 30 s" in failed["why"]
    trained = max(line["t"] for line in lines(tmp_path, "steps.jsonl"))
    assert trained < 100 + 40  # layers are built on the slow disk, too


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["i/o error", "full disk"])
def test_lines_that_cannot_be_written_are_kept_and_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    refused = failing(4, RunError(f"steps.jsonl cannot be written: {os.strerror(error)}"), RunFolder.append)
    monkeypatch.setattr(RunFolder, "append", refused)
    simulate(job(steps=STEPS), out=str(tmp_path))
    assert steps_in(tmp_path) == list(range(STEPS))
    assert lines(tmp_path, "events.jsonl")[0]["kind"] == "run_started"
    (failed,) = events(tmp_path, "storage_failed")
    assert (failed["path"], failed["delayed"]) == (str(tmp_path), "lines of steps and events")
    assert os.strerror(error) in failed["why"]
    (recovered,) = events(tmp_path, "storage_recovered")
    assert "dropped_lines" not in recovered


def test_a_summary_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = failing(5, RunError("summary.json cannot be written: 503"), RunFolder.write_json)
    monkeypatch.setattr(RunFolder, "write_json", refused)
    simulate(job(steps=2), out=str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def always(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_storage_that_stays_broken_ends_the_run_after_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointCatalog, "write_shard", always(CheckpointError("could not write x: it is full")))
    with pytest.raises(RunError, match=r"all steps are done, but the checkpoint of step 8 could not be .*full"):
        simulate(job(steps=STEPS), out=str(tmp_path), checkpoint_every=2)
    assert steps_in(tmp_path) == list(range(STEPS))
    assert lines(tmp_path, "events.jsonl")[-1]["kind"] == "failed"
    waiting = [event["delayed"] for event in events(tmp_path, "storage_failed")][1:]
    assert waiting[0].startswith("all steps are done; the checkpoint of step 8 (for another 59")
    assert len(waiting) == 10


def test_a_limit_of_the_user_ends_the_run_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointCatalog, "write_shard", always(CheckpointError("could not write x: it is full")))
    with pytest.raises(RunError, match=r"could not be written to .* for 5 s \(storage_timeout is 5\)"):
        simulate(job(steps=50), out=str(tmp_path), checkpoint_every=2, storage_timeout=5.0)
    assert 3 < len(steps_in(tmp_path)) < 50


# Lines on a real disk


def test_a_line_that_was_written_in_part_is_written_once(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.open()
    folder.append("steps.jsonl", b'{"step": 0}\n')
    real = folder._line_files["steps.jsonl"]

    class HalfFull:
        def write(self, data: Any) -> int:
            if len(data) < 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real.write(bytes(data)[:6])

        def fileno(self) -> int:
            return real.fileno()

        def close(self) -> None:
            real.close()

    folder._line_files["steps.jsonl"] = HalfFull()  # type: ignore[assignment]
    with pytest.raises(RunError, match=r"steps\.jsonl cannot be written: No space left on device"):
        folder.append("steps.jsonl", b'{"step": 1}\n')
    assert (tmp_path / "steps.jsonl").read_bytes() == b'{"step": 0}\n{"step'
    folder.append("steps.jsonl", b'{"step": 1}\n')
    folder.close()
    assert steps_in(tmp_path) == [0, 1]


@pytest.mark.parametrize("file", [".", "steps.jsonl"], ids=["folder", "file"])
def test_lines_are_written_when_what_was_moved_away_is_back(tmp_path: Path, file: str) -> None:
    """A line is never written to a file that has left its place, and nothing is created in place of the folder."""
    out, away = tmp_path / "run", tmp_path / "away"
    folder = RunFolder(str(out))
    folder.open()
    folder.append("steps.jsonl", b'{"step": 0}\n')
    (out / file).rename(away)
    if file == ".":
        with pytest.raises(RunError, match=r"steps\.jsonl cannot be written: No such file"):
            folder.append("steps.jsonl", b'{"step": 1}\n')
        with pytest.raises(RunError, match=r"the folder .*run is gone: bring it back, or create it"):
            folder.write_json("summary.json", {})
        assert not out.exists()
        away.rename(out)
    folder.append("steps.jsonl", b'{"step": 1}\n')
    folder.append("steps.jsonl", b'{"step": 2}\n')
    folder.close()
    assert steps_in(out) == [0, 1, 2]


def test_lines_of_a_deleted_folder_are_written_again_when_it_is_created(tmp_path: Path) -> None:
    out = tmp_path / "run"
    folder = RunFolder(str(out))
    folder.open()
    folder.append("steps.jsonl", b'{"step": 0}\n')
    shutil.rmtree(out)
    with pytest.raises(RunError, match="cannot be written"):
        folder.append("steps.jsonl", b'{"step": 1}\n')
    out.mkdir()
    folder.append("steps.jsonl", b'{"step": 1}\n')
    folder.close()
    assert steps_in(out) == [0, 1]


# Folders that vanish


@pytest.mark.parametrize("moved", ["run", "run/checkpoints"])
def test_a_folder_that_is_moved_away_for_a_moment_can_be_moved_back(tmp_path: Path, moved: str) -> None:
    """Nothing is created in its place meanwhile. Afterwards it has all steps, events and the newest checkpoint."""
    out, away, there = tmp_path / "run", tmp_path / "away", tmp_path / moved
    absent: list[bool] = []

    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(3)
        there.rename(away)
        await cluster.wait_until_committed(8)
        absent.append(not there.exists())
        away.rename(there)

    found = simulate(job(steps=12), out=str(out), checkpoint_every=2, script=script)
    assert absent == [True]
    assert found.summary["checkpoints"][-1] == 12
    assert steps_in(out) == list(range(12))
    assert events(out, "storage_failed")
    assert events(out, "storage_recovered")
    assert events(out, "finished")
    assert json.loads((out / "summary.json").read_text())["steps"] == 12
    CheckpointCatalog(Storage(out / "checkpoints")).check(12)


@pytest.mark.parametrize("removed", ["run", "run/checkpoints"])
def test_a_folder_that_stays_away_is_created_again(tmp_path: Path, removed: str) -> None:
    """With all lines, the summary and a checkpoint, some minutes later."""
    out = tmp_path / "run"

    async def script(cluster: Cluster) -> None:
        await cluster.wait_until_committed(3)
        shutil.rmtree(tmp_path / removed)

    found = simulate(job(steps=STEPS), out=str(out), checkpoint_every=2, script=script)
    assert found.summary["checkpoints"][-1] == STEPS
    CheckpointCatalog(Storage(out / "checkpoints")).check(STEPS)
    assert events(out, "storage_recovered")[-1]["seconds"] > 100
    assert steps_in(out) == list(range(STEPS))
    assert json.loads((out / "summary.json").read_text())["steps"] == STEPS


def test_shards_of_a_skipped_checkpoint_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 cannot write: shards of node 0 do not fill the disk meanwhile."""
    real, seen = CheckpointCatalog.write_shard, []

    def write_shard(catalog: CheckpointCatalog, step: int, name: str, tensors: Any) -> Any:
        if step < STEPS and name.endswith("-1.safetensors"):
            raise CheckpointError("could not write x: the disk is full")
        if step == STEPS:
            seen.append(catalog.storage.list())
        return real(catalog, step, name, tensors)

    monkeypatch.setattr(CheckpointCatalog, "write_shard", write_shard)
    found = simulate(job(steps=STEPS), out=str(tmp_path), checkpoint_every=2)
    assert found.summary["checkpoints"] == [STEPS]
    assert seen
    assert all(len(folders) <= 2 for folders in seen), seen


def test_a_trace_that_can_not_be_written_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RunFolder.write_json

    def write_json(folder: RunFolder, name: str, value: Any) -> None:
        if name == "trace.json":
            raise RunError("could not write trace.json: the disk is full")
        real(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", write_json)
    simulate(job(steps=2), out=str(tmp_path))
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2
    assert "the disk is full" in events(tmp_path, "trace_failed")[0]["why"]
    assert not events(tmp_path, "storage_failed")


def test_the_event_loop_does_not_wait_for_a_line_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe without a reader hangs as a stalled mount does."""
    monkeypatch.setattr(line_buffer, "retry_storage", functools.partial(retry_storage, stall_s=0.05))
    os.mkfifo(tmp_path / "steps.jsonl")
    folder = RunFolder(str(tmp_path))
    monkeypatch.setattr(RunFolder, "open", lambda _: (tmp_path / "steps.jsonl").open("ab"))
    failures: list[str] = []

    async def main() -> None:
        buffer = LineBuffer(folder, RealClock(), failures.append, lambda _: None)
        buffer.open()
        assert not await buffer.flush(1.0)
        buffer.close()

    asyncio.run(main())
    assert failures == ["it has not answered for 0 s"]
    with (tmp_path / "steps.jsonl").open("rb"):  # lets the thread go
        pass


def test_only_the_first_step_waits_for_a_line_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_return, real = threading.Event(), RunFolder.append

    def append(folder: RunFolder, name: str, data: bytes) -> None:
        may_return.wait()
        real(folder, name, data)

    monkeypatch.setattr(RunFolder, "append", append)

    async def main() -> None:
        buffer = LineBuffer(RunFolder(str(tmp_path)), RealClock(), lambda _: None, lambda _: None)
        buffer.open()
        assert await buffer.flush(60.0)
        buffer.write_event({"step": 0})
        await buffer.flush_unless_hanging(0.01)
        async with asyncio.timeout(60.0):
            await buffer.flush_unless_hanging(3600.0)
            assert not buffer.is_written
            may_return.set()
            assert await buffer.flush(3600.0)
            buffer.write_event({"step": 1})
            await buffer.flush_unless_hanging(3600.0)  # storage answers again: this waits
            assert buffer.is_written
        buffer.close()

    asyncio.run(main())
    assert [line["step"] for line in lines(tmp_path, "events.jsonl")] == [0, 1]


def test_the_buffer_of_lines_is_bounded_and_counts_what_it_drops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_buffer, "MAX_LINES", 10)
    monkeypatch.setattr(RunFolder, "append", failing(1, RunError("full"), RunFolder.append))
    dropped: list[int] = []

    async def main() -> None:
        buffer = LineBuffer(RunFolder(str(tmp_path)), RealClock(), lambda _: None, dropped.append)
        buffer.open()
        assert await buffer.flush(10.0)
        for step in range(30):
            buffer.write_event({"step": step})
        assert await buffer.flush(10.0, despite_failure=True)
        buffer.close()

    asyncio.run(main())
    assert dropped == [20]
    assert [line["step"] for line in lines(tmp_path, "events.jsonl")] == list(range(20, 30))
