"""Between two steps: what a worker waits for, and what it does meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from culm.runtime.clock import RealClock
from culm.runtime.worker import Worker

from .jobs import job

STEP = 5


class Copies:
    """A replica that has made the steps below STEP - 1: the sums of that one do not come."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def catch_up(self, step: int) -> None:
        self.asked.append(step)
        if step >= STEP:
            await asyncio.Event().wait()


def waiting(monkeypatch: pytest.MonkeyPatch, permit: int) -> tuple[Worker, Any, Copies]:
    """A worker that has made the steps below STEP, of which the last two are not committed."""
    monkeypatch.setattr(Worker, "_report_closed", lambda *_: None)
    unused: Any = None
    worker, copies = Worker(job(), 0, "agent", unused, RealClock()), Copies()
    worker.permit, worker.committed = permit, STEP - 2
    return worker, SimpleNamespace(epoch=SimpleNamespace(kept=True, number=1, until=None), shadows=copies), copies


def test_a_commit_lets_a_worker_go_on_whose_copy_waits_for_sums_that_others_have_yet_to_make(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        worker, executor, copies = waiting(monkeypatch, permit=STEP + 1)
        running = asyncio.create_task(worker._may_run(executor, STEP))
        await asyncio.sleep(0)
        assert copies.asked == [STEP - 1], "the commit needs no more of the copy"
        worker.committed = STEP - 1
        worker._news.set()
        assert await asyncio.wait_for(running, 60.0)

    asyncio.run(main())


def test_while_a_step_is_not_permitted_copies_make_all_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds back permits may wait for just that."""

    async def main() -> None:
        worker, executor, copies = waiting(monkeypatch, permit=STEP)
        running = asyncio.create_task(worker._may_run(executor, STEP))
        await asyncio.sleep(0)
        assert copies.asked == [STEP]
        running.cancel()

    asyncio.run(main())
