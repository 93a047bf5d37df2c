"""Whole runs through the command: what they print, what they leave, and how they go on."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from tests.cli.cli_process import JOBS, LIMIT_S, EndlessRun, culm, one_sentence

from culm.cli import main

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]


@pytest.fixture(scope="module")
def finished_run(
    forked_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run with checkpoints of steps 2, 4 and 6, and what the command printed."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    ended = culm(
        "run", JOBS, "--pipelines", "2", "--stages", "1", "--steps", "6", "--checkpoint-every", "2", "--keep-last", "3",
        "--out", str(folder), "--json",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return folder, ended


@pytest.fixture
def folder(finished_run: tuple[Path, object], tmp_path: Path) -> Path:
    """A copy, to be damaged or continued."""
    return Path(shutil.copytree(finished_run[0], tmp_path / "run"))


def test_json_is_the_summary_and_nothing_else_on_stdout(
    finished_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, ended = finished_run
    assert json.loads(ended.stdout) == json.loads((folder / "summary.json").read_text())
    assert len(ended.stdout.splitlines()) == 1


def test_progress_and_ledger_go_elsewhere_when_stdout_is_taken(
    finished_run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    shown = finished_run[1].stderr
    assert "2 x 1 (pipelines x stages): 2 nodes" in shown
    assert "nodes up 2/2" in shown
    assert "steps 6/6  loss " in shown
    assert "48, each counted once (expected 48, lost 0, duplicated 0)" in shown


def test_a_run_leaves_its_files_in_the_folder(finished_run: tuple[Path, object]) -> None:
    folder = finished_run[0]
    assert [json.loads(line)["step"] for line in (folder / "steps.jsonl").read_text().splitlines()] == list(range(6))
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]


def run_in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """What a command prints that succeeds in this process."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    shown = capsys.readouterr()
    assert end.value.code == 0, shown.err
    return shown.out, shown.err


def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_one(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, folder: Path
) -> None:
    whole = json.loads((folder / "summary.json").read_text())
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    shape = ("--stages", "1", "--pipelines", "2", "--steps", "6")
    printed, shown = run_in_process(capsys, "run", JOBS, *shape, "--resume", str(folder), "--json")
    assert json.loads(printed)["weights_sha256"] == whole["weights_sha256"]
    assert "from step 4 on" in shown


def test_a_corrupt_checkpoint_is_skipped_and_reported(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, folder: Path
) -> None:
    shard = next((folder / "checkpoints" / "step-00000006").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    words = " ".join(run_in_process(capsys, "run", JOBS, "--steps", "8", "--resume", str(folder))[0].split())
    assert "from step 4 on" in words
    assert "checkpoint 6 was passed over" in words


def test_weights_are_exported_to_one_file_that_is_not_overwritten(
    finished_run: tuple[Path, object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "model.safetensors"
    ended = culm("export", str(finished_run[0]), str(target), "--step", "4")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{target}: 8 tensors, {target.stat().st_size / 1e6:.2f} MB, of step 4\n"
    with safe_open(target, framework="pt") as file:
        assert {"0.weight", "3.bias"} <= set(file.keys())
    with pytest.raises(SystemExit) as end:
        main(["export", str(finished_run[0]), str(target)])
    assert end.value.code == 2
    assert f"{target} exists" in one_sentence(capsys.readouterr().err)


def test_a_loss_that_is_no_number_stops_the_run(capsys: pytest.CaptureFixture[str], shared_fork_server: None) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", f"{JOBS}:not_a_number", "--quiet"])
    assert end.value.code == 1
    assert "the loss of step 1 is nan" in one_sentence(capsys.readouterr().err)


def test_a_loss_that_is_not_a_number_is_skipped_if_requested(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None
) -> None:
    printed, _ = run_in_process(capsys, "run", f"{JOBS}:not_a_number", "--set", "nonfinite=skip", "--quiet", "--json")
    summary = json.loads(printed)
    assert summary["skipped_steps"] == 3
    assert summary["final_loss"] == "nan"


def test_an_exception_in_a_layer_is_shown_once_with_node_and_layer() -> None:
    ended = culm("run", f"{JOBS}:stumbling", "--stages", "2", "--strategy", "none", "--quiet")
    assert ended.returncode == 1
    assert ended.stdout == ""
    said = one_sentence(ended.stderr)
    assert said.startswith("culm: node 1: layer 2 (Stumbling) raised ZeroDivisionError")
    assert said.endswith("stumbled over a stone")


def test_what_user_code_prints_appears_and_quiet_hides_the_rest() -> None:
    ended = culm("run", f"{JOBS}:talking", "--stages", "2", "--quiet")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "the job speaks"
    assert lines.count("a layer speaks [not markup]") >= 16
    assert set(lines[1:]) == {"a layer speaks [not markup]"}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a file system takes root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_ends_a_run_with_a_storage_timeout_and_keeps_the_checkpoint_before(tiny_disk: Path) -> None:
    run = EndlessRun("--quiet", "--out", str(tiny_disk), "--checkpoint-every", "10", "--storage-timeout", "1")
    try:
        while not list(tiny_disk.glob("checkpoints/step-*/manifest.json")):
            assert run.process.poll() is None
            time.sleep(0.01)
        with contextlib.suppress(OSError), (tiny_disk / "something else").open("wb", buffering=0) as file:
            while file.write(bytes(512)):
                pass
        _, told = run.process.communicate(timeout=LIMIT_S)
    finally:
        run.clean_up()
    assert run.process.returncode == 1
    said = one_sentence(told)
    assert str(tiny_disk) in said
    assert "disk is full" in said or "No space left" in said
    assert list((tiny_disk / "checkpoints").glob("step-*/manifest.json"))


def test_layers_are_measured_and_the_profile_cuts_the_next_run(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    measured = culm("profile", JOBS, "--device", "cpu", "--out", str(file), "--json")
    assert measured.returncode == 0, measured.stderr
    assert json.loads(measured.stdout) == json.loads(file.read_text())
    assert [layer["name"] for layer in json.loads(measured.stdout)["layers"]] == ["Narrow"] * 4
    assert "measuring layers 4/4" in measured.stderr
    summary = json.loads(
        run_in_process(capsys, "run", JOBS, "--nodes", "2", "--profile", str(file), "--quiet", "--json")[0]
    )
    assert summary["pipelines"] * summary["stages"] <= 2
