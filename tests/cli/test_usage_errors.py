"""A wrong request ends with one sentence, exit code 2, and nothing started or changed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.cli_process import JOBS, one_sentence

from culm.cli import main
from culm.cli.checks import bench_command
from culm.cluster.store.etcd import parse_etcd_access
from culm.errors import UsageError
from culm.providers.execute_run import check_local_nodes
from culm.providers.shared_run import SharedRun


def usage_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence, from a command that must end before it starts any process."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert shown.out == ""
    return one_sentence(shown.err)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--schedule", "1fb1"], "no --schedule '1fb1': did you mean 1f1b?"),
        (["--strategy", "nnoe"], "no --strategy 'nnoe': did you mean none?"),
        (["--strategy", "prayer"], "there is no --strategy 'prayer': use auto or none"),
        (["--pipelines", "0"], "--pipelines is 0: use a whole number of at least 1"),
        (["--checkpoint-every", "-1"], "--checkpoint-every is -1: use a whole number of at least 0"),
        (["--checkpoint-every", "5"], "--checkpoint-every needs a folder to write to: add --out"),
        (["--keep-last", "0"], "--keep-last is 0"),
        (["--memory", "lots"], "--memory 'lots' is not a size"),
        (["--ports", "7100"], "--ports '7100' is not a range: write the first and the last port"),
        (["--ports", "7100-7000"], "--ports 7100-7000 is not a range"),
        (["--set", "stepz=3"], "--set stepz=3: no such field: did you mean 'steps'?"),
        (["--set", "steps=many"], "--set steps=many: the field steps takes a whole number, not 'many'"),
        (["--set", "exact=maybe"], "the field exact takes true or false"),
        (["--set", "steps"], "--set 'steps' is not an assignment: write field=value"),
        (["--steps", "3", "--set", "steps=4"], "--steps and --set steps=4 are both given: leave one out"),
        (["--stagse", "3"], "No such option: --stagse"),
        (["--stages", "some"], "Invalid value for '--stages'"),
        (["--stages", "1.5"], "(it is '1.5')"),
        (["--stages=1.5"], "(it is '1.5')"),
        (["--steps", "-1"], "Job.steps is -1: use a whole number of at least 0"),
        (["--set", "micro_batch=0"], "Job.micro_batch is 0: use a whole number of at least 1"),
        (["--out", ""], "--out is '': name a place, or omit it"),
        (["--speedup", "60"], "--speedup is for a run on a trace: add --trace FILE, or omit it"),
        (["--notice", "30"], "--notice is for a run on a trace: add --trace FILE, or omit it"),
    ],
)
def test_invalid_options_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert sentence in usage_error(capsys, "run", JOBS, *options)


@pytest.mark.parametrize(("kills", "traced", "option"), [(("node=0",), False, "--kill"), ((), True, "--trace")])
def test_nodes_of_other_machines_cannot_be_killed_from_here(kills: tuple[str, ...], traced: bool, option: str) -> None:
    setup: Any = SimpleNamespace(nodes=4, kills=kills)
    ours = SharedRun(access=parse_etcd_access("http://127.0.0.1:1"), job="a", secret=b"", local_nodes=3)
    with pytest.raises(UsageError, match=f"{option} kills nodes of this machine only: omit it, or use --local 4"):
        check_local_nodes(ours, setup, has_trace=traced)
    check_local_nodes(replace(ours, local_nodes=4), setup, has_trace=traced)


def test_a_job_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no job file 'nowhere.py'" in usage_error(capsys, "run", "nowhere.py:job")
    assert "there is no job file 'nowhere.py'" in usage_error(capsys, "profile", "nowhere.py")


def test_a_run_never_mixes_with_what_is_in_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = usage_error(capsys, "run", JOBS, "--out", str(tmp_path))
    assert f"--out '{tmp_path}' exists and is not empty: give another folder" in said
    said = usage_error(capsys, "run", JOBS, "--out", str(tmp_path / "notes.txt"))
    assert "is a file: give a folder that does not exist yet" in said
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["1fb1"], "there is no schedule '1fb1': did you mean '1f1b'?"),
        (["1f1b", "--stages", "0"], "stages"),
        (["1f1b", "--pipelines", "9"], "micro"),
        (["1f1b", "--times", "Q=1"], "--times has 'Q=1': write kinds out of F, I, W, R, S"),
        (["1f1b", "--times", "F=fast"], "--times has 'F=fast'"),
    ],
)
def test_impossible_schedules_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert sentence in usage_error(capsys, "schedule", *arguments)


def test_a_file_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["schedule", "1f1b", "--svg", str(tmp_path / "missing" / "a.svg")])
    assert end.value.code == 2
    assert "cannot be written: No such file or directory" in one_sentence(capsys.readouterr().err)


def test_an_unknown_verb_or_bench_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'run'?" in usage_error(capsys, "rnu")
    assert "there is no bench 'pipelines': did you mean pipeline?" in usage_error(capsys, "bench", "pipelines")


def test_without_the_source_tree_the_bench_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("culm.__file__", str(tmp_path / "site-packages" / "culm" / "__init__.py"))
    with pytest.raises(UsageError, match="installed without its benchmarks: clone the repository"):
        bench_command.source_tree()


def test_a_folder_without_checkpoints_cannot_be_exported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = usage_error(capsys, "export", str(tmp_path), str(tmp_path / "model.safetensors"))
    assert "holds no committed checkpoint" in said


@pytest.mark.real
@pytest.mark.parametrize(
    ("job", "options", "sentence"),
    [
        ("jbo", [], "jobs.py has no function 'jbo': did you mean 'job'?"),
        ("number", [], "jobs.py:number returned a value of type int, not a culm.Job: return culm.Job(...)"),
        ("raises", [], "jobs.py:raises raised FileNotFoundError: no such corpus"),
        ("leaves", [], "jobs.py:leaves raised SystemExit: I have had enough"),
        ("uneven", [], "Job.global_batch is 10, not divisible by Job.micro_batch 4: use micro_batch=5"),
        ("misfit", [], "layer 1 (Wide) raised RuntimeError on input (2, 4) float32"),
        ("vector_loss", [], "Job.loss returned a tensor of shape (4,): return a scalar mean"),
        ("job", ["--set", "micro_batch=3"], "Job.global_batch is 8, not divisible by Job.micro_batch 3"),
        ("job", ["--stages", "9"], "4 layers can fill at most 4 stages; use --stages 4"),
        ("job", ["--pipelines", "5"], "--pipelines 5 is more than the 4 micro-batches of a step: use at most 4"),
        ("job", ["--nodes", "4", "--pipelines", "3", "--stages", "2"], "--nodes 4 is not --pipelines 3 x --stages 2"),
        ("job", ["--nodes", "1", "--stages", "2"], "use --nodes 2"),
        ("job", ["--stages", "2", "--memory", "100"], "memory is 100 bytes"),
        ("job", ["--profile", "nowhere.json"], "the profile 'nowhere.json' could not be read"),
        ("job", ["--resume", "nowhere"], "--resume 'nowhere': there is no committed checkpoint in nowhere/checkpoints"),
    ],
)
def test_a_job_that_cannot_run_is_refused_with_field_and_fix(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, job: str, options: list[str], sentence: str
) -> None:
    assert sentence in usage_error(capsys, "run", f"{JOBS}:{job}", "--quiet", *options)


@pytest.mark.real
def test_a_file_that_raises_on_import_is_refused_and_leaves_no_folder(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    said = usage_error(capsys, "run", str(tmp_path / "broken.py"), "--quiet", "--out", str(tmp_path / "runs"))
    assert "broken.py could not be imported: ModuleNotFoundError: No module named 'no_such_module'" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.real
def test_debug_shows_where_it_came_from(capsys: pytest.CaptureFixture[str], shared_fork_server: None) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", f"{JOBS}:raises", "--quiet", "--debug"])
    shown = capsys.readouterr().err
    assert end.value.code == 2
    assert 'raise FileNotFoundError("no such corpus")' in shown
    assert shown.splitlines()[-1].endswith("jobs.py:raises raised FileNotFoundError: no such corpus")


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


@pytest.mark.real
def test_ports_that_are_taken_are_refused(
    capsys: pytest.CaptureFixture[str], shared_fork_server: None, used_port: int
) -> None:
    said = usage_error(capsys, "run", JOBS, "--quiet", "--ports", f"{used_port}-{used_port}")
    assert f"--ports {used_port}-{used_port} has 0 free ports" in said


def test_the_job_file_of_a_refused_request_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("print('imported')\n")
    ended = subprocess.run(
        [sys.executable, "-c", "from culm.cli import main; main()", "run", "loud.py", "--keep-last", "0"],
        capture_output=True, text=True, timeout=180, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--speedup", "0"], "--speedup is 0: use a number above 0"),
        (["--notice", "nan"], "--notice is nan: use a number of at least 0"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: list[str], sentence: str
) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n")
    assert sentence in usage_error(capsys, "run", JOBS, "--trace", str(tmp_path / "trace.csv"), *option)


def test_a_terminal_that_cannot_draw_a_character_gets_another_instead() -> None:
    made = subprocess.run(
        [sys.executable, "-c", "from culm.cli import main; main()", "schedule", "1f1b", "--times", "F=\u00bd"],
        capture_output=True, timeout=180, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii:strict"},
    )  # fmt: skip
    assert made.returncode == 2
    assert b"culm: --times has 'F=?'" in made.stderr
