"""The run folder: files that other tools open, on a path or a URL, and each step in them once."""

from __future__ import annotations

import errno
import json
import math
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pytest

from culm.errors import RunError, UsageError
from culm.observe.step_metrics import StepMetrics
from culm.observe.writers.run_folder import (
    RunFolder,
    check_folder_empty,
    create_run_folder,
    perfetto_trace,
    saved_checkpoint_steps,
)


@pytest.fixture(params=["path", "file URL", "memory URL"])
def out(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> str:
    return {"path": str(tmp_path / "a" / "run"), "file URL": f"file://{tmp_path}/a/run", "memory URL": memory_url}[
        request.param
    ]


def lines(out: str, name: str) -> list[dict[str, Any]]:
    with fsspec.open(f"{out}/{name}", "r") as file:
        return [json.loads(line) for line in file.read().splitlines()]


def write(out: str, *steps: int, resumed_at: int | None = None) -> None:
    folder = RunFolder(out, resumed_at=resumed_at)
    folder.open()
    folder.write_event({"t": 0.0, "kind": "run_started", "node": None})
    for step in steps:
        folder.write_step(StepMetrics(step=step, loss=float(step), samples=8, t=0.1))
    folder.close()


def steps(out: str) -> list[int]:
    return [line["step"] for line in lines(out, "steps.jsonl")]


def test_lines_stand_in_their_files_one_for_each_step_and_event(out: str) -> None:
    write(out, 0, 1, 2)
    assert steps(out) == [0, 1, 2]
    assert lines(out, "events.jsonl") == [{"t": 0.0, "kind": "run_started", "node": None}]


def test_a_new_run_begins_its_files_anew(out: str) -> None:
    write(out, 0, 1, 2)
    write(out, 0)
    assert steps(out) == [0]
    assert len(lines(out, "events.jsonl")) == 1


def test_a_resumed_run_continues_and_redone_steps_are_listed_once(out: str) -> None:
    write(out, 0, 1, 2, 3, 4)
    write(out, 3, 4, 5, resumed_at=3)
    assert steps(out) == [0, 1, 2, 3, 4, 5]
    assert len(lines(out, "events.jsonl")) == 2


def test_a_resumed_run_without_steps_of_its_own_leaves_none_of_those_after_its_checkpoint(out: str) -> None:
    write(out, 0, 1, 2, 3, 4)
    write(out, resumed_at=3)
    assert steps(out) == [0, 1, 2]


def test_a_run_may_resume_into_a_folder_that_is_new(out: str) -> None:
    write(out, 3, 4, resumed_at=3)
    assert steps(out) == [3, 4]


def test_a_line_that_was_cut_off_when_its_writer_died_is_dropped(out: str) -> None:
    write(out, 0, 1)
    for name in ("steps.jsonl", "events.jsonl"):
        with fsspec.open(f"{out}/{name}", "r") as file:
            text = file.read()
        with fsspec.open(f"{out}/{name}", "w") as file:
            file.write(text + '{"step": 1, "lo')
    write(out, 2, resumed_at=2)
    assert steps(out) == [0, 1, 2]
    assert len(lines(out, "events.jsonl")) == 2


@pytest.mark.parametrize("work", ["open", "rewind"])
def test_a_leader_that_takes_over_does_not_hold_the_lines_of_the_whole_run(tmp_path: Path, work: str) -> None:
    """Memory for them would grow with the run."""
    (tmp_path / "steps.jsonl").write_text("".join(f'{{"step": {step}, "loss": 0.125}}\n' for step in range(200_000)))
    size = (tmp_path / "steps.jsonl").stat().st_size
    folder = RunFolder(str(tmp_path), resumed_at=200_000)
    if work == "rewind":
        folder.open()
    tracemalloc.start()
    try:
        folder.rewind(100_000) if work == "rewind" else folder.open()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    folder.close()
    assert size > 5 << 20
    assert peak < 2 << 20
    assert len(steps(str(tmp_path))) == (100_000 if work == "rewind" else 200_000)


def test_on_a_path_lines_are_there_as_they_happen(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.open()
    folder.write_step(StepMetrics(step=0))
    assert steps(str(tmp_path)) == [0]
    folder.close()


def test_on_a_url_lines_are_there_after_every_sync(memory_url: str) -> None:
    folder = RunFolder(memory_url)
    folder.open()
    for step in range(3):
        folder.write_step(StepMetrics(step=step))
        folder.sync()
        assert steps(memory_url) == list(range(step + 1))
    folder.close()


def test_what_is_not_finite_is_written_so_that_every_reader_of_json_can_read_it(out: str) -> None:
    folder = RunFolder(out)
    folder.open()
    folder.write_step(StepMetrics(step=0, loss=math.nan, norm=math.inf))
    folder.write_json("summary.json", {"final_loss": math.nan, "evaluations": {3: -math.inf}, "list": [math.nan, 1.5]})
    folder.close()

    def refuse(constant: str) -> Any:
        raise AssertionError(f"bare {constant}")

    for name in ("steps.jsonl", "summary.json"):
        with fsspec.open(f"{out}/{name}", "r") as file:
            found = json.loads(file.read(), parse_constant=refuse)
        assert math.isnan(float(found.get("loss", found.get("final_loss"))))


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(None)
    folder.open()
    folder.write_step(StepMetrics(step=0))
    folder.write_event({"kind": "x"})
    folder.write_json("summary.json", {})
    folder.sync()
    folder.close()
    assert folder.checkpoints is None
    assert list(tmp_path.iterdir()) == []


class Full:
    """An open file on a disk without room."""

    def __init__(self, file: BinaryIO) -> None:
        self.fileno = file.fileno

    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_one_sentence_and_a_line_can_be_written_when_there_is_room(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.open()
    opened = folder._line_files
    folder._line_files = {name: Full(file) for name, file in opened.items()}  # type: ignore[misc]
    with pytest.raises(RunError, match=f"{tmp_path}/steps.jsonl cannot be written: No space left on device"):
        folder.write_step(StepMetrics(step=0))
    folder.write_step(StepMetrics(step=0))
    folder.close()
    assert steps(str(tmp_path)) == [0]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="a part of the path is a file, not a folder"):
        RunFolder(str(tmp_path / "file" / "run")).open()


def test_a_summary_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path))
    folder.write_json("summary.json", {"steps": 1})
    with pytest.raises(TypeError):
        folder.write_json("summary.json", {"steps": object()})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "summary.json").write_text("{}")
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "old"), f"file://{tmp_path}/old", f"local://{tmp_path}/old"):
        with pytest.raises(UsageError, match="empty: give another"):
            check_folder_empty(place)
    with pytest.raises(UsageError, match="is a file: give a folder"):
        check_folder_empty(str(tmp_path / "file"))
    for place in (str(tmp_path / "new" / "one"), f"local://{tmp_path}/new"):
        check_folder_empty(place)
    assert not (tmp_path / "new").exists()
    create_run_folder(str(tmp_path / "new" / "one"))
    assert (tmp_path / "new" / "one").is_dir()


@pytest.mark.parametrize("place", ["nosuch://x/y", "memory://run"])
def test_a_place_that_nodes_cannot_reach_is_refused_before_anything_starts(place: str) -> None:
    with pytest.raises(UsageError, match=f"--out '{place}' "):
        check_folder_empty(place)


@pytest.mark.parametrize("place", ["http://127.0.0.1:1/run", "simplecache::http://127.0.0.1:1/run"])
def test_a_url_that_cannot_be_written_is_refused_before_anything_starts(place: str) -> None:
    with pytest.raises(UsageError, match=f"--out '{place}' cannot be "):
        create_run_folder(place)


def test_a_folder_below_the_home_is_the_same_for_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    create_run_folder("~/run")
    folder = RunFolder("~/run")
    folder.open()
    folder.close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["events.jsonl", "steps.jsonl"]


def test_what_is_saved_is_found_whatever_its_folder_is_called(tmp_path: Path) -> None:
    out = tmp_path / "lr=[0.1] *"
    for step in (3, 12):
        (out / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (out / "checkpoints" / "step-00000003" / "manifest.json").write_text("")
    assert saved_checkpoint_steps(str(out)) == [3]
    assert saved_checkpoint_steps(str(tmp_path / "nowhere")) == saved_checkpoint_steps("nosuch://x") == []


def test_a_trace_is_what_chrome_and_perfetto_open() -> None:
    spans = {1: [(0, "0F0", 10.0, 10.5), (0, "0B0", 11.0, 11.25)], 3: [(1, "12F3", 10.25, 10.25)]}
    trace = json.loads(json.dumps(perfetto_trace(spans, {1: "node 1", 3: "node 3"}), allow_nan=False))
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {1: "node 1", 3: "node 3"}
    actions = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["tid"], e["name"], e["cat"], e["ts"], e["dur"], e["args"]["step"]) for e in actions] == [
        (1, "0F0", "F", 0.0, 0.5e6, 0),
        (1, "0B0", "B", 1e6, 0.25e6, 0),
        (3, "12F3", "F", 0.25e6, 0.0, 1),
    ]


def test_a_trace_of_nothing_is_a_trace() -> None:
    assert perfetto_trace({}, {}) == {"traceEvents": [], "displayTimeUnit": "ms"}
