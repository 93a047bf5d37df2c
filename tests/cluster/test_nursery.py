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

from culm.cluster.setup import Request
from culm.errors import RunError, UsageError
from culm.providers.local import LocalNursery, make_room
from culm.providers.nursery import JobSource, Load, Nursery, Refused, fork, reports
from culm.providers.strike import Board


def interrupted() -> Any:
    raise KeyboardInterrupt


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "asks to end": (lambda: sys.exit(3), "SystemExit: 3"),
    "is interrupted": (interrupted, "KeyboardInterrupt"),
    "ends at once": (lambda: os._exit(9), "trying the layers out ended the process with exit code 9"),
    "ends as if all were well": (lambda: os._exit(0), "trying the layers out ended the process with exit code 0"),
    "is killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), "trying the layers out ended with signal 9"),
}


@pytest.mark.real
@pytest.mark.parametrize("name", ENDS)
def test_whoever_waits_hears_that_trying_the_layers_out_has_ended_however_it_did(name: str) -> None:
    made, sentence = ENDS[name]
    ours, theirs = Pipe()
    board = Board()
    try:
        Nursery(theirs, board)._aside(made)
        assert ours.poll(0)
        report = reports.decode(ours.recv_bytes())
        assert isinstance(report, Refused)
        assert report.message.startswith(sentence)
    finally:
        board.close()


@pytest.mark.real
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("os._exit(4)", "the nursery of local nodes has ended with exit code 4: a job must not end who imports it"),
        ("os.abort()", "the nursery of local nodes has ended by SIGABRT: a job must not end who imports it"),
        ("os.kill(os.getpid(), 9)", "the nursery of local nodes has ended by SIGKILL: is there enough memory?"),
    ],
)
def test_a_job_that_ends_the_process_that_imports_it_is_told_how(
    forked: None, tmp_path: Path, line: str, sentence: str
) -> None:
    (tmp_path / "ends.py").write_text(f"import os\n{line}\n")
    with LocalNursery() as nursery:
        nursery.order(Load(JobSource(reference=str(tmp_path / "ends.py")), Request()))
        with pytest.raises(RunError) as ended:
            asyncio.run(asyncio.wait_for(nursery.report(), 60))
    assert str(ended.value) == sentence


@pytest.mark.real
def test_a_launcher_that_is_gone_is_not_reported_to() -> None:
    ours, theirs = Pipe()
    board = Board()
    try:
        ours.close()
        Nursery(theirs, board)._aside(lambda: sys.exit(3))
    finally:
        board.close()


def test_files_that_nodes_need_are_asked_for_and_refused_where_the_machine_has_them_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [20, 100]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.__setitem__(slice(None), wanted))
    make_room(2)
    assert limits == [20, 100]
    make_room(8)
    assert limits == [32, 100]
    with pytest.raises(UsageError, match=r"may have 100 files open \(ulimit -n\), and 64 nodes need 144: allow more"):
        make_room(64)


@pytest.mark.real
def test_a_node_that_can_not_go_on_says_why_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RunError("the store is out of reach")

    _, status = os.waitpid(fork(fails), 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert capfd.readouterr().err == "culm: the store is out of reach\n"
