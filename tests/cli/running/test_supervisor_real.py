"""The supervisor carries a run through the death of etcd and through whatever happens to its launcher."""

from __future__ import annotations

import functools
import json
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.cli_process import CULM, JOBS, LIMIT_S, EndlessRun, alive, culm, descendants, one_sentence

import culm as culm_package
from culm.job import load_job
from culm.providers.local_provider import ForkServerClient
from culm.testing import reference

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("forked_programs")]

BRIEF, ENDLESS = f"{JOBS}:brief", f"{JOBS}:endless"
Start = Callable[..., EndlessRun]


@functools.cache
def failure_free() -> str:
    return reference(load_job(BRIEF)).weights_sha256


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The registry of the test's own jobs."""
    place = tmp_path / "home"
    monkeypatch.setenv("CULM_HOME", str(place))
    return place


@pytest.fixture
def brief(training: Start, tmp_path: Path) -> EndlessRun:
    """A run that lasts for seconds, in its first steps."""
    run = training("--out", str(tmp_path / "a"), job=BRIEF)
    assert not (tmp_path / "a/summary.json").exists()
    return run


def weights(folder: Path) -> str:
    found: str = json.loads((folder / "summary.json").read_text())["weights_sha256"]
    return found


def ended(pids: list[int]) -> bool:
    """Whether these processes end, at the latest after a minute."""
    until = time.monotonic() + LIMIT_S
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def check_saved(folder: Path, fork_server: ForkServerClient) -> None:
    """The endless run has a checkpoint of its last step. Continued for two steps, it equals a failure-free one."""
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["checkpoints"][-1] == summary["steps"] > 0
    job = load_job(ENDLESS, {"steps": str(summary["steps"] + 2)})
    continued = culm_package.train(job, stages=2, resume=folder, fork_server=fork_server)
    assert continued.weights_sha256 == reference(job).weights_sha256


def test_a_killed_etcd_is_restarted_and_no_bit_differs(brief: EndlessRun, tmp_path: Path) -> None:
    os.kill(brief.etcd_pid, signal.SIGKILL)
    assert brief.next_line("the private etcd has ended by SIGKILL") != ""
    assert brief.process.wait(LIMIT_S) == 0
    assert weights(tmp_path / "a") == failure_free()
    assert brief.still_running() == []


def test_a_run_completes_while_its_launcher_is_stopped(brief: EndlessRun, tmp_path: Path) -> None:
    os.kill(brief.process.pid, signal.SIGSTOP)
    assert not (tmp_path / "a/summary.json").exists()
    others = [pid for pid in brief.all_pids if pid not in (brief.process.pid, brief.supervisor_pid)]
    assert ended(others)
    os.kill(brief.process.pid, signal.SIGCONT)
    output, error = brief.process.communicate(timeout=LIMIT_S)
    assert (brief.process.returncode, error) == (0, "")
    assert "steps 120/120" in output
    assert weights(tmp_path / "a") == failure_free()
    assert brief.still_running() == []


def test_when_the_launcher_is_killed_a_checkpoint_is_written_and_nothing_is_left(
    training: Start, tmp_path: Path, home: Path, fork_server: ForkServerClient
) -> None:
    run = training("--out", str(tmp_path / "a"))
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.still_running(LIMIT_S) == []
    assert list((home / "runs").iterdir()) == []
    check_saved(tmp_path / "a", fork_server)


def test_when_a_process_with_a_hook_is_killed_the_run_ends_with_a_checkpoint(
    tmp_path: Path, fork_server: ForkServerClient
) -> None:
    """The hook runs in that process, and steps wait for it."""
    out = tmp_path / "a"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.hooked_training", ENDLESS, str(out)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "step 0\n"
        started = descendants(process.pid)
        assert len(started) == 3 + 2 * 2
        process.kill()
    assert ended(started)
    check_saved(out, fork_server)


@pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="started with nohup: runs outlive their terminal"
)
def test_when_the_terminal_is_closed_a_checkpoint_is_written_and_nothing_is_left(
    tmp_path: Path, fork_server: ForkServerClient
) -> None:
    """The launcher gets SIGHUP, and cannot print what it does about it."""
    ours, terminal = pty.openpty()
    process = subprocess.Popen(
        [CULM, "run", ENDLESS, "--stages", "2", "--out", str(tmp_path / "a")],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    while not re.search(rb"loss +\d+\.\d", shown):
        shown += os.read(ours, 1 << 16)
    started = descendants(process.pid)
    assert len(started) == 3 + 2 * 2
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(LIMIT_S) != 0
    assert ended(started)
    check_saved(tmp_path / "a", fork_server)


def test_a_supervisor_that_is_killed_ends_the_run_with_a_sentence(training: Start) -> None:
    run = training()
    code, said = run.signal_and_wait(run.supervisor_pid)
    assert code == 1
    assert "the supervisor of the run has ended by SIGKILL" in one_sentence(said)
    assert run.still_running() == []
    assert "no job of this user is running" in culm("attach", "jobs").stderr


@pytest.fixture
def detached(tmp_path: Path, home: Path) -> Iterator[str]:
    """The name of a detached endless run."""
    started = culm("run", ENDLESS, "--stages", "2", "--detach", "--json", "--out", str(tmp_path / "a"))
    assert started.returncode == 0, started.stderr
    name = json.loads(started.stdout)["job"]
    supervisor = json.loads((home / "runs" / name / "job.json").read_text())["pid"]
    yield name
    pids = [supervisor, *descendants(supervisor)]
    culm("stop", name, "--now")
    assert ended(pids)


def test_a_detached_run_can_be_watched_logged_and_stopped(detached: str, tmp_path: Path, home: Path) -> None:
    assert detached == "jobs"
    entry = home / "runs" / "jobs"
    assert stat.S_IMODE(entry.stat().st_mode) == 0o700
    supervisor = json.loads((entry / "job.json").read_text())["pid"]
    with subprocess.Popen(
        [CULM, "attach", "jobs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as window:
        assert window.stdout is not None
        assert any(line.startswith("steps ") for line in window.stdout)
        window.send_signal(signal.SIGINT)
        _, said = window.communicate(timeout=LIMIT_S)
    assert window.returncode == 130
    assert "job 'jobs' goes on: end it with culm stop jobs" in one_sentence(said)
    logged = culm("logs", str(tmp_path / "a"))
    assert "1 x 2 (pipelines x stages), 2 nodes" in logged.stdout
    assert "step 0: loss" in logged.stdout
    unknown = culm("attach", "job")
    assert unknown.returncode == 2
    known = "did you mean jobs? The known jobs are jobs"
    assert f"there is no job 'job' on this machine: {known}" in one_sentence(unknown.stderr)
    processes = [supervisor, *descendants(supervisor)]
    stopped = culm("stop", "jobs")
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped by culm stop: writing a checkpoint at the next step boundary" in stopped.stdout
    assert f"steps are saved: continue with --resume {tmp_path / 'a'}" in stopped.stdout
    assert ended(processes)
    assert list((tmp_path / "a/checkpoints").iterdir())
    again = culm("attach", "jobs")
    assert again.returncode == 143
    assert "steps are saved" in one_sentence(again.stderr)
    assert "has ended already" in one_sentence(culm("stop", "jobs").stderr)
    assert "step 0: loss" in culm("logs", "jobs").stdout


def test_the_exit_code_and_the_summary_of_an_attached_window_are_those_of_the_run(tmp_path: Path) -> None:
    started = culm("run", BRIEF, "--stages", "2", "--detach", "--out", str(tmp_path / "a"))
    assert "job jobs runs in the background: culm attach jobs shows it" in started.stdout
    shown = culm("attach", str(tmp_path / "a"), "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["weights_sha256"] == failure_free()
    assert culm("logs", "jobs", "-f").stdout.endswith("finished: 120 steps\n")


def test_a_run_that_python_starts_continues_without_it(tmp_path: Path) -> None:
    code = f"import culm; print(culm.start({BRIEF!r}, stages=2, out={str(tmp_path / 'a')!r}))"
    started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (started.returncode, started.stdout) == (0, "jobs\n"), started.stderr
    assert culm("attach", "jobs").returncode == 0
    assert weights(tmp_path / "a") == failure_free()


def test_a_detached_run_that_is_refused_says_so(tmp_path: Path) -> None:
    refused = culm("run", JOBS, "--stages", "9", "--detach", cwd=tmp_path)
    assert refused.returncode == 2
    assert "use --stages 4" in one_sentence(refused.stderr)
