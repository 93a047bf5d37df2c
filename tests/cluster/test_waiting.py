"""Between two steps: what a worker waits for, and what it does meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from culm.runtime import stint
from culm.runtime.stint import Stint
from culm.runtime.terms import Terms

STEP = 5


class Copies:
    """A replica that has made the steps below STEP - 1: the sums of that one do not come."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def catch_up(self, step: int) -> None:
        self.asked.append(step)
        if step >= STEP:
            await asyncio.Event().wait()


def waiting(monkeypatch: pytest.MonkeyPatch, permit: int) -> tuple[Stint, Copies]:
    """The stint of a worker that has made the steps below STEP, of which the last two are not committed."""
    copies, terms, unused = Copies(), Terms(), SimpleNamespace()
    monkeypatch.setattr(stint, "Closing", lambda _: unused)
    monkeypatch.setattr(stint, "Shadows", lambda *_: copies)
    monkeypatch.setattr(Stint, "_report_closed", lambda _: None)
    terms.permit, terms.committed = permit, STEP - 2
    epoch = SimpleNamespace(kept=True, number=1, until=None)
    executor: Any = SimpleNamespace(job=unused, epoch=epoch, clock=unused)
    saving: Any = unused
    return Stint(executor, terms, saving), copies


def test_a_commit_lets_a_worker_go_on_whose_copy_waits_for_sums_that_others_have_yet_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        waits, copies = waiting(monkeypatch, permit=STEP + 1)
        running = asyncio.create_task(waits._may_run(STEP))
        await asyncio.sleep(0)
        assert copies.asked == [STEP - 1], "the commit needs no more of the copy"
        waits.terms.committed = STEP - 1
        waits.terms.news.set()
        assert await asyncio.wait_for(running, 60.0)

    asyncio.run(main())


def test_while_a_step_is_not_permitted_copies_make_all_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds back permits may wait for just that."""

    async def main() -> None:
        waits, copies = waiting(monkeypatch, permit=STEP)
        running = asyncio.create_task(waits._may_run(STEP))
        await asyncio.sleep(0)
        assert copies.asked == [STEP]
        running.cancel()

    asyncio.run(main())
