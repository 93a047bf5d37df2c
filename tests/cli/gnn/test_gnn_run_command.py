"""`culm gnn run`: JSON output, the run folder, and one sentence for an invalid request."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.gnn.run_folder import all_processes_ended

from culm.cli import main

SMALL = "gen:sbm,vertices=60,classes=3,features=6"
SUMMARY_KEYS = ("steps", "samples", "samples_expected", "samples_lost", "samples_duplicated", "wall_s", "goodput",
            "final_loss", "weights_sha256", "state_sha256", "strategy", "preemptions", "recoveries", "cost_usd",
            "epochs", "test_accuracy", "val_accuracy",
            "time_per_epoch_s", "relaunches", "value", "pipelines", "stages", "schedule", "exact",
            "checkpoints")  # fmt: skip


def run_culm(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["gnn", "run", *arguments])
    return int(ended.value.code or 0)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_json_is_alone_on_stdout_and_the_folder_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["--epochs", "6", "--evaluate-every", "3", "--mode", "async", "--staleness", "1", "--workers", "2"]
    arguments += ["--checkpoint-every", "2"]
    assert run_culm("--graph", SMALL, *arguments, "--out", str(out), "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert [name for name in SUMMARY_KEYS if name not in summary] == []
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["checkpoints"]
    assert set(summary["checkpoints"]) <= {2, 4, 6}
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(6))
    assert set(steps[0]) == {"step", "loss", "samples", "t"}
    assert {"worker-up", "server-up", "evaluation"} <= {
        json.loads(line)["kind"] for line in (out / "events.jsonl").read_text().splitlines()
    }
    assert "<svg" in (out / "report.html").read_text()


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
def test_the_table_shows_accuracy_cost_and_sample_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_culm("--graph", SMALL, "--epochs", "4", "--servers", "2", "--workers", "1") == 0
    shown = capsys.readouterr().out
    for arguments in ("accuracy", "each counted once", "cost", "prices of", "value", "2 graph, 1 parameter"):
        assert arguments in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--graph", "nowhere.npz"], "--graph 'nowhere.npz' is not a file"),
        (["--graph", "gen:rmat,scale=30"], "GiB are free"),
        (["--graph", SMALL, "--model", "sage"], "--model 'sage': use gcn or gat"),
        (["--graph", SMALL, "--mode", "lazy"], "--mode 'lazy': use sync, pipe, async"),
        (["--graph", SMALL, "--workers", "many"], "--workers 'many'"),
        (["--graph", SMALL, "--workers", "0"], "--workers 0: give a number of at least 1"),
        (["--graph", SMALL, "--servers", "61"], "--servers 61 for 60 vertices"),
        (["--graph", SMALL, "--servers", "0"], "--servers is 0: give at least 1"),
        (
            ["--graph", SMALL, "--heads", "3", "--model", "gat", "--hidden", "64"],
            "--hidden 64 is not a multiple of --heads 3",
        ),
        (["--graph", SMALL, "--launcher", "post"], "no launcher 'post'"),
        (["--graph", SMALL, "--instance", "z9.tiny"], "'z9.tiny'"),
        (["--graph", SMALL, "--kill", "cat"], "--kill 'cat'"),
        (["--graph", SMALL, "--intervals", "0"], "--intervals is 0: give at least 1"),
        (["--graph", SMALL, "--lr", "-1"], "--lr is -1"),
        (["--graph", SMALL, "--seed", str(1 << 63)], "--seed is 9223372036854775808: give a number of up to 63 bits"),
        (["--graph", SMALL, "--hidden", "1000000000"], "GiB are free"),
        (["--graph", SMALL, "--layers", "1000000000"], "--layers 1000000000: a model has at most 10000"),
        (["--graph", SMALL, "--epochs", "10000000000"], "--epochs is 10000000000: give at most 10000000"),
        (["--graph", SMALL, "--threads", "100000"], "--threads is 100000: give at most 1024"),
        (["--graph", SMALL, "--workers", "1000000000"], "--workers 1000000000: give at most 10000"),
        ([], "--graph"),
    ],
)
def test_an_invalid_request_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_culm(*arguments) == 2
    stderr = capsys.readouterr().err
    assert sentence in stderr
    assert "Traceback" not in stderr
    assert stderr.count("\n") == 1


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "something").write_text("here")
    assert run_culm("--graph", SMALL, "--out", str(tmp_path)) == 2
    assert "is not empty" in capsys.readouterr().err


def test_an_npz_with_an_edge_in_one_direction_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one-way.npz"
    np.savez(path, indptr=[0, 1, 1], indices=[1], labels=[0, 1], features=np.ones((2, 2)))
    assert run_culm("--graph", str(path)) == 2
    assert "1 of 1 edges have no reverse, the first from 1 to 0" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.real
@pytest.mark.parametrize(
    ("number", "wrapper"),
    [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"])],
    ids=["ctrl-c", "terminated", "terminated in the background of a script, where ctrl-c is ignored"],
)
def test_a_signal_ends_all_processes(number: signal.Signals, wrapper: list[str], tmp_path: Path) -> None:
    arguments = ["--graph", SMALL, "--epochs", "100000", "--workers", "1", "--out", str(tmp_path / "run")]
    process = subprocess.Popen(
        [*wrapper, sys.executable, "-m", "culm", "gnn", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    events = tmp_path / "run" / "events.jsonl"
    while not events.exists() or '"evaluation"' not in events.read_text():  # all processes have worked by then
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait() == 128 + number
    assert "Traceback" not in process.stdout.read()
    process.stdout.close()
    assert all_processes_ended(tmp_path / "run")
    assert 'class="state failed"' in (tmp_path / "run" / "report.html").read_text()
