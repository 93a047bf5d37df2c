"""A node is forked out of a process that has everything imported."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from culm.errors import RunError
from culm.providers.nursery import Nursery, Refused, fork, reports
from culm.providers.strike import Board


def interrupted() -> Any:
    raise KeyboardInterrupt


ENDS: dict[str, tuple[Callable[[], Any], str]] = {
    "asks to end": (lambda: sys.exit(3), "SystemExit: 3"),
    "is interrupted": (interrupted, "KeyboardInterrupt: "),
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
def test_a_node_that_can_not_go_on_says_why_in_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RunError("the store is out of reach")

    _, status = os.waitpid(fork(fails), 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert capfd.readouterr().err == "culm: the store is out of reach\n"
