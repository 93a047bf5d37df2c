"""Jobs of this machine are found by name or folder, by their owner only, and only while they live."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from culm.cluster.run_setup import RunResult
from culm.errors import UsageError
from culm.providers.supervisor.run_registry import RegisteredJob, find_job, known_jobs, registry_name
from culm.providers.supervisor.window_messages import RunEnded, RunNamed, ToWindow, encode_frame, read_kept_frames


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / ("deep" * 40)  # longer than a socket address
    monkeypatch.setenv("CULM_HOME", str(place))
    return place


def test_a_job_is_found_by_its_name_and_by_its_folder_however_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = RegisteredJob("gpt", "runs/a", "gpt.py")
    for given in ("gpt", "runs/a", str(tmp_path / "runs/a"), f"file://{tmp_path}/runs/../runs/a"):
        found = find_job(given)
        assert found.running
        assert found.entry == job.entry
    found.connect().close()
    job.close()
    assert known_jobs() == []


def test_a_second_job_of_a_name_gets_a_number() -> None:
    jobs = [RegisteredJob("gpt", None, "") for _ in range(3)]
    assert [job.entry.name for job in jobs] == ["gpt", "gpt-2", "gpt-3"]
    with pytest.raises(
        UsageError, match=r"no job 'gtp' on this machine: did you mean gpt\? The known jobs are gpt, gpt-2, gpt-3"
    ):
        find_job("gtp")
    jobs[1].close()
    assert RegisteredJob("gpt", None, "").entry.name == "gpt-2"


def test_only_the_owner_can_read_what_is_registered(home: Path) -> None:
    job = RegisteredJob("gpt", None, "")
    for folder in (home, home / "runs", home / "runs/gpt"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    job.close(b"shown")
    assert stat.S_IMODE((home / "runs/gpt/history").stat().st_mode) == 0o600


def test_the_entry_of_a_killed_supervisor_is_removed(home: Path) -> None:
    job = RegisteredJob("gpt", None, "")
    job.socket.close()
    job._file.close()  # as the kernel does for a process that is killed
    assert known_jobs() == []
    assert list((home / "runs").iterdir()) == []


def test_what_an_ended_job_has_shown_is_kept_until_a_job_takes_its_name() -> None:
    shown: list[ToWindow] = [RunNamed("gpt"), RunEnded(RunResult(error="RunError", message="out of luck"))]
    RegisteredJob("gpt", None, "").close(b"".join(map(encode_frame, shown)))
    found = find_job("gpt")
    assert not found.running
    assert list(read_kept_frames(found.history())) == shown
    job = RegisteredJob("gpt", None, "")
    assert job.entry.name == "gpt"
    assert find_job("gpt").running
    job.close()


def test_a_home_that_cannot_be_written_is_named(home: Path) -> None:
    home.write_text("not a folder")
    with pytest.raises(UsageError, match="set CULM_HOME to a folder of your own"):
        RegisteredJob("gpt", None, "")
    assert known_jobs() == []


@pytest.mark.parametrize(
    ("job_name", "reference", "name"),
    [
        (None, "examples/gpt.py:job", "gpt"),
        (None, "gpt.py", "gpt"),
        ("big", "gpt.py", "big"),
        (None, "", "train"),
        (None, "my job.py", "my-job"),
        (None, ".hidden", "hidden"),
    ],
)
def test_a_job_is_named_after_its_file(job_name: str | None, reference: str, name: str) -> None:
    assert registry_name(job_name, reference) == name
