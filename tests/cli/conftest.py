from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
from tests.cli.cli_process import EndlessRun

from culm.cli.running import run_command as verb
from culm.cli.running.run_launcher import launch_run
from culm.providers.local_provider import ForkServerClient


@pytest.fixture
def shared_fork_server(monkeypatch: pytest.MonkeyPatch, fork_server: ForkServerClient) -> None:
    """`culm run`, called in this process, takes the fork server that is there."""
    monkeypatch.setattr(verb, "launch_run", functools.partial(launch_run, fork_server=fork_server))


@pytest.fixture
def training() -> Iterator[Callable[..., EndlessRun]]:
    """Starts runs, and leaves none behind whatever the test finds."""
    started: list[EndlessRun] = []

    def start(*options: str, **choices: str) -> EndlessRun:
        started.append(EndlessRun(*options, **choices))
        started[-1].wait_for_steps()
        return started[-1]

    yield start
    for run in started:
        run.clean_up()
