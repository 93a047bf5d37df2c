"""docs/paths.md names files that a step and a loss really pass through, and its counts of files hold."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.docs.markdown import ROOT
from torch import nn

import culm
from culm.testing import Faults, simulate
from culm.testing.simulated_machines import SimulatedMachines

PAGE = (ROOT / "docs" / "paths.md").read_text()
PACKAGE = Path(culm.__file__).parent
STEP, KILL_STEP, STEPS = 3, 4, 6


class Points(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((4,), index / 64), torch.ones(4)


def _job(on_step: Callable[[Any], None]) -> culm.Job:
    return culm.Job(
        layers=[lambda: nn.Linear(4, 4) for _ in range(4)],
        loss=lambda output, target: ((output - target) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=Points(),
        global_batch=16,
        micro_batch=2,
        steps=STEPS,
        on_step=on_step,
    )


@contextmanager
def _called_files() -> Iterator[tuple[Callable[[], None], Callable[[], None], set[str]]]:
    """(start, stop, the files of culm with a function that was called in between)."""
    called: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)

    before = sys.getprofile()
    try:
        yield lambda: sys.setprofile(note), lambda: sys.setprofile(before), called
    finally:
        sys.setprofile(before)


def _files(called: set[str]) -> set[str]:
    """Paths below src/culm, without the simulated cluster itself."""
    inside = {str(Path(file).relative_to(PACKAGE)) for file in called if Path(file).is_relative_to(PACKAGE)}
    return {file for file in inside if not file.startswith("testing/")}


@pytest.fixture(scope="module")
def files_of_a_step() -> set[str]:
    with _called_files() as (start, stop, called):

        def on_step(metrics: Any) -> None:
            if metrics.step == STEP:
                start()
            elif metrics.step == STEP + 1:
                stop()

        simulate(_job(on_step), pipelines=2, stages=2, strategy="reroute")
    return _files(called)


@pytest.fixture(scope="module")
def files_of_a_loss() -> set[str]:
    """From the kill to the commit of the step in which it happens."""
    with _called_files() as (start, stop, called), pytest.MonkeyPatch.context() as patch:
        kill = SimulatedMachines.kill

        def observed(self: SimulatedMachines, *arguments: Any, **options: Any) -> None:
            start()
            kill(self, *arguments, **options)

        def on_step(metrics: Any) -> None:
            if metrics.step == KILL_STEP:
                stop()

        patch.setattr(SimulatedMachines, "kill", observed)
        faults = Faults().kill(1, at="1B1", step=KILL_STEP)
        run = simulate(_job(on_step), pipelines=2, stages=2, strategy="reroute", faults=faults)
        assert not run.faults_not_reached(faults)
    return _files(called)


def _table_files(title: str) -> list[str]:
    """The files in the second column of the table below a heading."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if re.match(r"\| \d", line)]
    return [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]


def _is_called(name: str, called: set[str]) -> bool:
    return any(f"/{file}".endswith(f"/{name}") for file in called)


def _count_of(row: str) -> int:
    """The number in the last column of a row of the page."""
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {row}"))
    return int(line.rstrip(" |").rsplit("|", 1)[1])


def test_a_step_calls_the_files_that_the_page_names(files_of_a_step: set[str]) -> None:
    names = _table_files("The path of a step")
    assert len(names) == 6
    protocols = {"transport/interface.py"}  # what is called is an implementation of it
    assert [name for name in names if name not in protocols and not _is_called(name, files_of_a_step)] == []


def test_a_loss_calls_the_files_that_the_page_names(files_of_a_loss: set[str]) -> None:
    names = _table_files("The path of a node loss")
    assert len(names) > 10
    assert [name for name in names if not _is_called(name, files_of_a_loss)] == []


def test_the_counts_of_files_are_current(files_of_a_step: set[str], files_of_a_loss: set[str]) -> None:
    in_step = {file for file in files_of_a_step if file.startswith(("runtime/", "transport/"))}
    assert len(in_step) <= _count_of("files of `runtime` and `transport` called")
    assert "runtime/handoff.py" not in in_step
    assert len(files_of_a_step) <= _count_of("files of the package called in one step")
    assert len(files_of_a_loss) <= _count_of("files of the package called from the kill")
