from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from culm.cli import run as verb
from culm.cli.launch import launch
from culm.providers.local import LocalNursery

from .command import Training


@pytest.fixture
def shared_nursery(monkeypatch: pytest.MonkeyPatch, nursery: LocalNursery) -> None:
    """`culm run`, called in this process, takes the nursery that is there."""
    monkeypatch.setattr(verb, "launch", functools.partial(launch, nursery=nursery))


@pytest.fixture
def training() -> Iterator[Callable[..., Training]]:
    """Starts runs, and leaves none behind whatever the test finds."""
    started: list[Training] = []

    def start(*options: str) -> Training:
        started.append(Training(*options))
        started[-1].wait_for_steps()
        return started[-1]

    yield start
    for run in started:
        run.clean_up()
