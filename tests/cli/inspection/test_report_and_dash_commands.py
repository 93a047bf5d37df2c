"""`culm report` and `culm dash`: what they write, serve and refuse."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tests.cli.cli_process import CULM, JOBS, LIMIT_S, culm, one_sentence
from tests.observe.sample_runs import EVENTS, SUMMARY

from culm.cli import main
from culm.observe.report.load_run import RunFolderReader


def make_run_folder(folder: Path, **summary: Any) -> Path:
    """The folder of a run that is done."""
    folder.mkdir(parents=True)
    lines = [{"step": n, "loss": 1.0 / (n + 1), "samples": 8, "t": 0.5 + n} for n in range(10)]
    end = {"t": 11.0, "kind": "finished", "steps": 10, "samples": 80}
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [*EVENTS, end]))
    (folder / "summary.json").write_text(json.dumps({**SUMMARY, **summary}))
    return folder


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_the_report_of_a_run_is_in_its_folder_and_its_path_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run_folder(tmp_path / "a")
    assert exit_code("report", f"{folder}/") == 0
    assert capsys.readouterr().out == f"{folder}/report.html\n"
    text = (folder / "report.html").read_text()
    assert "Every sample counted once" in text
    assert "Plotly" in text


def test_a_comparison_is_written_here_or_to_the_given_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (
        make_run_folder(tmp_path / "x" / "run"),
        make_run_folder(tmp_path / "y" / "run", weights_sha256="ef"),
    )
    assert exit_code("report", str(first), str(second)) == 0
    assert capsys.readouterr().out == "report.html\n"
    text = (tmp_path / "report.html").read_text()
    assert "Same weights" in text
    assert f"{first}; {second}" in text  # both are called run
    assert exit_code("report", str(first), str(second), "--out", "both.html") == 0
    assert (tmp_path / "both.html").exists()


def test_json_has_the_facts_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        make_run_folder(tmp_path / "a"),
        make_run_folder(tmp_path / "b", weights_sha256="ef", final_loss="nan"),
    )
    assert exit_code("report", str(first), str(second), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same_weights"] is False
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert found["runs"][0]["every_sample_once"] is True
    assert found["runs"][0]["recoveries"][0]["source"] == "peers"
    assert found["runs"][1]["loss"] == pytest.approx(0.1)
    assert not (first / "report.html").exists()


def test_a_report_is_read_from_and_written_to_a_url(memory_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fsspec.open(f"{memory_url}/summary.json", "w") as file:
        file.write(json.dumps(SUMMARY))
    assert exit_code("report", memory_url) == 0
    with fsspec.open(f"{memory_url}/report.html", "r") as file:
        assert "Every sample counted once" in file.read()


@pytest.mark.parametrize(("arguments", "told"), [
    (["report", "/nowhere"], "there is no folder '/nowhere'"),
    (["report", "{empty}"], "is not the folder of a run"),
    (["report", "nosuch://bucket/run"], "cannot be opened"),
    (["dash"], "give the folder of a run, or --etcd URL --job NAME"),
    (["dash", "{run}", "--etcd", "http://x"], "one of the two"),
    (["dash", "{run}", "--job", "gpt"], "add --etcd"),
    (["dash", "--etcd", "http://127.0.0.1:1"], "say which with --job"),
    (["dash", "{run}", "--port", "70000"], "--port is 70000"),
    (["dash", "{run}", "--host", "192.0.2.7"], "cannot listen there"),
    (["dash", "/nowhere"], "there is no folder"),
])  # fmt: skip
def test_what_cannot_be_shown_is_refused_in_a_sentence(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"run": str(make_run_folder(tmp_path / "run")), "empty": str(tmp_path / "empty")}
    assert exit_code(*(word.format(**places) for word in arguments)) == 2
    assert told in one_sentence(capsys.readouterr().err)


def test_a_report_that_cannot_be_written_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("report", str(make_run_folder(tmp_path / "a")), "--out", "/proc/report.html") == 1
    assert "give another place with --out" in one_sentence(capsys.readouterr().err)


@contextmanager
def serving_page(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A command that serves a page, and where."""
    process = subprocess.Popen([CULM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "shown at" in line)
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def fetch(address: str) -> str:
    return str(urllib.request.urlopen(address, timeout=LIMIT_S).read().decode())


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dash_serves_a_folder_until_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    with serving_page("dash", str(make_run_folder(tmp_path / "a"))) as (process, address):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
        assert "Every sample counted once" in fetch(address)
        assert 'culm_steps_total{run="a"} 10' in fetch(f"{address}metrics")
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 128 + number
        assert "Traceback" not in stderr


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("folder", [True, False])
def test_a_run_is_shown_while_it_goes_with_a_folder_and_without(folder: bool, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "run")] if folder else []
    with serving_page("run", f"{JOBS}:endless", "--stages", "2", "--dash", *out) as (process, address):
        while 'state="running"} 1' not in (figures := fetch(f"{address}metrics")) or "culm_loss" not in figures:
            pass
        assert "culm_nodes" in figures
        assert not folder or RunFolderReader(str(tmp_path / "run")).read().has_open_writer
        assert "running" in fetch(address)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130
        assert "Traceback" not in stderr


@pytest.mark.real
@pytest.mark.usefixtures("forked_programs")
def test_a_quiet_run_still_says_where_it_is_shown() -> None:
    ended = culm("run", JOBS, "--stages", "2", "--dash", "--quiet")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert one_sentence(ended.stderr).startswith("culm: the run is shown at http://127.0.0.1:")
