"""The files of a run are read as they are: whole, growing, begun anew, cut off, or not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from culm.errors import UsageError
from culm.observe.report.load_run import RunFolderReader

WRITES = """
import fcntl, sys
from pathlib import Path
file = Path(sys.argv[1], "events.jsonl").open("a")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
input()
"""


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": 1.0 / (step + 1), "samples": 8, "t": 0.1 * step}) + "\n"


def steps(folder: RunFolderReader) -> list[int]:
    return [found.step for found in folder.read().steps]


def test_lines_that_come_are_read_once_and_one_that_is_being_written_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text(line(0) + line(1)[:9])
    folder = RunFolderReader(str(tmp_path))
    assert steps(folder) == [0]
    with file.open("a") as more:
        more.write(line(1)[9:] + line(2))
    assert steps(folder) == [0, 1, 2]
    assert folder.read().damaged_lines == 0
    with file.open("a") as more:
        more.write(line(3).rstrip("\n"))  # complete but for its end
    assert steps(folder) == [0, 1, 2, 3]
    with file.open("a") as more:
        more.write("\n")
    assert steps(folder) == [0, 1, 2, 3]


def test_a_file_that_is_begun_anew_is_read_anew(tmp_path: Path) -> None:
    """A run that goes back to a checkpoint puts a shorter file in the place of the old one."""
    (tmp_path / "steps.jsonl").write_text("".join(map(line, range(5))))
    folder = RunFolderReader(str(tmp_path))
    assert steps(folder) == [0, 1, 2, 3, 4]
    (tmp_path / "new").write_text("".join(map(line, [0, 1, 2, 3, 4, 5])))
    (tmp_path / "new").rename(tmp_path / "steps.jsonl")
    assert steps(folder) == [0, 1, 2, 3, 4, 5]


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(line(0).encode() + b"\xff\x00{\n[1]\n" + line(1).encode())
    (tmp_path / "events.jsonl").write_text('{"t": 1}\n{"t": "late", "kind": "lost", "node": 3}\n')
    (tmp_path / "summary.json").write_text('{"steps": ')
    found = RunFolderReader(str(tmp_path)).read()
    assert [step.step for step in found.steps] == [0, 1]
    assert found.damaged_lines == 3
    assert [(event["t"], event["kind"]) for event in found.events] == [(0.0, "lost")]
    assert found.summary is None


def test_a_run_is_read_from_a_url(memory_url: str) -> None:
    with fsspec.open(f"{memory_url}/steps.jsonl", "w") as file:
        file.write(line(0))
    folder = RunFolderReader(memory_url)
    assert steps(folder) == [0]
    with fsspec.open(f"{memory_url}/steps.jsonl", "w") as file:
        file.write(line(0) + line(1))
    assert steps(folder) == [0, 1]
    assert folder.read().name == "run"


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere"):
        RunFolderReader(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="is not the folder of a run"):
        RunFolderReader(str(tmp_path))
    RunFolderReader(str(tmp_path), allow_empty=True)
    (tmp_path / "cat.jpg").write_text("")
    with pytest.raises(UsageError, match=r"it has none of summary\.json"):
        RunFolderReader(str(tmp_path), allow_empty=True)
    with pytest.raises(UsageError, match="cannot be opened"):
        RunFolderReader("nosuch://place/run")


def test_whether_another_process_writes_the_files_is_seen_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        folder = RunFolderReader(str(tmp_path))
        assert folder.read().has_open_writer is True
        process.kill()
        process.wait()
        assert folder.read().has_open_writer is False
    (tmp_path / "events.jsonl").unlink()
    assert folder.read().has_open_writer is None
