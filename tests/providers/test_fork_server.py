"""A node is forked out of a process that has everything imported."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from culm.config import RunConfig
from culm.errors import RunError, UsageError
from culm.providers.fork_server import ForkServer, JobSource, LoadFailed, LoadJob, fork, reply_decoder
from culm.providers.kill_injection import ProcessTable
from culm.providers.local_provider import ForkServerClient, raise_open_file_limit


def interrupted() -> Any:
    raise KeyboardInterrupt


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "asks to end": (lambda: sys.exit(3), "SystemExit: 3"),
    "is interrupted": (interrupted, "KeyboardInterrupt"),
    "ends at once": (lambda: os._exit(9), "running the layers once ended the process with exit code 9"),
    "ends as if all were well": (lambda: os._exit(0), "running the layers once ended the process with exit code 0"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "running the layers once ended with signal 9"),
}


@pytest.mark.real
@pytest.mark.parametrize("name", ENDS)
def test_the_launcher_gets_a_reply_however_the_trial_run_of_the_layers_ends(name: str) -> None:
    made, sentence = ENDS[name]
    ours, theirs = Pipe()
    table = ProcessTable()
    try:
        ForkServer(theirs, table)._reply_from_child(made)
        assert ours.poll(0)
        report = reply_decoder.decode(ours.recv_bytes())
        assert isinstance(report, LoadFailed)
        assert report.message.startswith(sentence)
    finally:
        table.close()


@pytest.mark.real
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("os._exit(4)", "the fork server of local nodes has ended with exit code 4: a job must not end its process"),
        ("os.abort()", "the fork server of local nodes has ended by SIGABRT: a job must not end its process"),
        ("os.kill(os.getpid(), 9)", "the fork server of local nodes has ended by SIGKILL: is there enough memory?"),
    ],
)
def test_a_job_that_ends_the_process_that_imports_it_is_an_error_that_says_how(
    forked_programs: None, tmp_path: Path, line: str, sentence: str
) -> None:
    (tmp_path / "ends.py").write_text(f"import os\n{line}\n")
    with ForkServerClient() as fork_server:
        fork_server.send_command(LoadJob(JobSource(reference=str(tmp_path / "ends.py")), RunConfig()))
        with pytest.raises(RunError) as ended:
            asyncio.run(asyncio.wait_for(fork_server.next_reply(), 60))
    assert str(ended.value) == sentence


@pytest.mark.real
def test_a_launcher_that_is_gone_is_not_reported_to() -> None:
    ours, theirs = Pipe()
    table = ProcessTable()
    try:
        ours.close()
        ForkServer(theirs, table)._reply_from_child(lambda: sys.exit(3))
    finally:
        table.close()


def test_the_limit_of_open_files_is_raised_as_needed_and_a_lower_hard_limit_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [20, 100]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.__setitem__(slice(None), wanted))
    raise_open_file_limit(2)
    assert limits == [20, 100]
    raise_open_file_limit(8)
    assert limits == [32, 100]
    with pytest.raises(UsageError, match=r"may have 100 files open \(ulimit -n\), and 64 nodes need 144: allow more"):
        raise_open_file_limit(64)


@pytest.mark.real
def test_a_node_that_cannot_continue_reports_why_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RunError("the store is out of reach")

    _, status = os.waitpid(fork(fails), 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert capfd.readouterr().err == "culm: the store is out of reach\n"
