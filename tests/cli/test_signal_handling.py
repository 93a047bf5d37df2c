"""Signals end a command gently, wherever it runs and however often they come."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from culm.cli.signal_handling import Interrupted, run_until_signal, sigterm_raises
from culm.errors import RunError


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """As a script's shell starts what ends in `&`: Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.usefixtures("in_the_background")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_in_the_background_too(number: signal.Signals) -> None:
    ended = []

    async def main() -> None:
        try:
            _send(number)
            sum(range(10_000))  # busy: nothing is raised into what runs
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(Interrupted, match="by SIG") as error:
        run_until_signal(main(), lambda heard: f"by {signal.Signals(heard).name}")
    assert error.value.exit_code == 128 + number
    assert ended


def test_a_second_signal_does_not_disturb_what_is_being_ended() -> None:
    ended = []

    async def main() -> None:
        try:
            _send(signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            _send(signal.SIGINT)
            for _ in range(5):  # the loop hears it meanwhile
                await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(Interrupted) as error:
        run_until_signal(main(), lambda _: "terminated")
    assert error.value.exit_code == 128 + signal.SIGTERM
    assert ended


def test_a_signal_that_is_handled_gracefully_lets_the_command_end_by_itself() -> None:
    ended = []

    async def main() -> None:
        _send(signal.SIGINT)
        await asyncio.sleep(0.01)
        ended.append(True)

    with pytest.raises(Interrupted, match="saved") as error:
        run_until_signal(main(), lambda _: "saved", lambda: True)
    assert error.value.exit_code == 130
    assert ended


def test_the_second_signal_cancels_a_command_that_ends_gracefully() -> None:
    answers = [True, False]

    async def main() -> None:
        _send(signal.SIGINT)
        await asyncio.sleep(0.01)
        _send(signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(Interrupted, match="ended"):
        run_until_signal(main(), lambda _: "ended", lambda: answers.pop(0))
    assert not answers


def test_what_goes_wrong_without_a_signal_stays_what_it_is() -> None:
    async def main() -> None:
        raise RunError("out of luck")

    with pytest.raises(RunError, match="out of luck") as error:
        run_until_signal(main(), lambda _: "terminated")
    assert not isinstance(error.value, Interrupted)


def test_before_a_loop_runs_sigterm_is_an_error_like_any_other() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="terminated"), sigterm_raises(lambda _: "terminated"):
        _send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
