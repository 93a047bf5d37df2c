"""A node is forked out of a process that has everything imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest

from culm.providers.nursery import Nursery, Refused, reports
from culm.providers.strike import Board

AFTER_THE_FORK = """
import sys
from culm.providers import nursery
nursery._preload()
before = set(sys.modules)
import torch
from culm import Job
from culm.testing import reference
job = Job(
    layers=[torch.nn.Linear(2, 2)], loss=torch.nn.functional.mse_loss, optimizer=torch.optim.AdamW,
    data=[(torch.zeros(2), torch.zeros(2))], global_batch=1, micro_batch=1, steps=1,
)
reference(job)
print(*sorted(name for name in set(sys.modules) - before if not name.startswith("culm.")))
"""


@pytest.mark.real
def test_a_node_imports_next_to_nothing_of_its_own() -> None:
    made = subprocess.run([sys.executable, "-c", AFTER_THE_FORK], capture_output=True, text=True, check=True)
    imported = made.stdout.split()
    assert len(imported) < 20, imported


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
