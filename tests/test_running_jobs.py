"""`culm.attach`, `culm.logs` and `culm.stop`: jobs that run in the background, from Python."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from tests.cli.cli_process import JOBS, LIMIT_S

import culm
from culm.job import load_job
from culm.machines.head_registry import HeadLaunch, note_head_launch
from culm.testing import reference

BRIEF, ENDLESS = f"{JOBS}:brief", f"{JOBS}:endless"
SUMMARY = {
    "steps": 3, "samples": 12, "samples_expected": 12, "samples_lost": 0, "samples_duplicated": 0, "wall_s": 1.0,
    "goodput": 12.0, "strategy": "none", "pipelines": 1, "stages": 1, "schedule": "1f1b", "exact": False,
    "final_loss": 0.5, "weights_sha256": "a", "state_sha256": "b", "preemptions": 0, "recoveries": [],
    "cost_usd": 0.0, "checkpoints": [3], "config": {"out": "s3://bucket/a"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The registry of the test's own jobs."""
    monkeypatch.setenv("CULM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def has_steps(folder: Path) -> bool:
    path = folder / "steps.jsonl"
    return path.exists() and path.stat().st_size > 0


@pytest.mark.real
def test_a_job_is_waited_for_and_its_summary_is_that_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = culm.start(BRIEF, stages=2, out=tmp_path / "a")
    summary = culm.attach(name, progress=False)
    assert summary.weights_sha256 == reference(load_job(BRIEF)).weights_sha256
    assert summary.out == str(tmp_path / "a")
    assert summary.weights()
    assert capfd.readouterr() == ("", "")
    assert culm.attach(tmp_path / "a", progress=True).steps == summary.steps  # ended, and known by its folder
    assert "steps " in capfd.readouterr().err
    with pytest.raises(culm.CulmError, match="job 'jobs' has ended already"):
        culm.stop(name)
    lines = list(culm.logs(name))
    assert lines[0].startswith(f"{BRIEF}: 1 x 2")
    assert lines[-1] == f"finished: {summary.steps} steps"


def test_of_a_folder_the_log_is_its_events(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"t": 0.5, "kind": "node_lost", "node": 3}\n{"t"')
    assert list(culm.logs(tmp_path)) == [
        "     0.500 s  node_lost  node=3", f"(a line of {tmp_path / 'events.jsonl'} cannot be read)",
    ]  # fmt: skip
    with pytest.raises(culm.CulmError, match="no job"):
        culm.logs(tmp_path / "none")


@pytest.mark.real
def test_a_log_is_followed_until_the_job_is_stopped_or_the_iteration_is_left(tmp_path: Path) -> None:
    name = culm.start(ENDLESS, stages=2, out=tmp_path / "a")
    next(line for line in culm.logs(name, follow=True) if " step 1" in line)
    following = culm.logs(name, follow=True)
    next(line for line in following if " step 2" in line)
    assert " step 1" in "".join(culm.logs(name))
    stopped = culm.stop(name)
    with pytest.raises(culm.CulmError) as ended:
        list(following)
    assert str(ended.value) == stopped


@pytest.mark.real
def test_culm_stop_writes_a_checkpoint_and_ends_culm_attach(tmp_path: Path) -> None:
    name = culm.start(ENDLESS, stages=2, out=tmp_path / "a")
    until = time.monotonic() + LIMIT_S
    while not has_steps(tmp_path / "a"):
        assert time.monotonic() < until
        time.sleep(0.02)

    async def wait_and_stop() -> tuple[str, BaseException]:
        waiting = asyncio.ensure_future(asyncio.to_thread(culm.attach, name, progress=False))
        said = await asyncio.to_thread(culm.stop, name)
        (error,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(error, BaseException)
        return said, error

    said, error = asyncio.run(wait_and_stop())
    assert "continue with --resume" in said
    assert isinstance(error, culm.CulmError)
    assert str(error) == said
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert summary["checkpoints"][-1] == summary["steps"]


def on_head(tmp_path: Path, answer: str) -> None:
    """A launch on a head whose ssh gives this answer."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nfor command; do :; done\necho "$command" >> {tmp_path}/commands\n{answer}\n')
    ssh.chmod(0o700)
    note_head_launch(HeadLaunch("gpt-1", "gpt", "me@stays", (str(ssh),), ("culm",), time.time()))


def test_a_job_on_a_head_is_waited_for_and_ended_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    on_head(tmp_path, f"echo '{json.dumps(SUMMARY)}'")
    summary = culm.attach("gpt")
    assert (summary.steps, summary.out) == (3, "s3://bucket/a")
    on_head(tmp_path, "echo 'stopped: 3 steps are saved'")
    assert culm.stop("gpt-1", at_once=True) == "stopped: 3 steps are saved"
    assert (tmp_path / "commands").read_text() == "culm attach gpt --quiet --json\nculm stop gpt --now\n"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("answer", "code", "sentence"),
    [
        ("echo 'culm: the loss is NaN' >&2; exit 1", 1, "the loss is NaN"),
        ("echo 'culm: job gpt has ended already' >&2; exit 2", 2, "job gpt has ended already"),
        ("echo down >&2; exit 255", 1, "the head me@stays cannot be reached; the run goes on there: down"),
    ],
)
def test_errors_of_a_head_are_raised_here(tmp_path: Path, answer: str, code: int, sentence: str) -> None:
    on_head(tmp_path, answer)
    for function in (culm.attach, culm.stop):
        with pytest.raises(culm.CulmError) as raised:
            function("gpt")
        assert (raised.value.exit_code, str(raised.value)) == (code, sentence)


def test_an_unknown_job_is_refused() -> None:
    for function in (culm.attach, culm.stop):
        with pytest.raises(
            culm.CulmError, match="there is no job 'gpt' on this machine: no job of this user is running"
        ):
            function("gpt")
