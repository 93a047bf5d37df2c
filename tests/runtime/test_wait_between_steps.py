"""What a worker waits for between two steps, and what it does meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from culm.runtime import train_loop
from culm.runtime.step_limits import StepLimits
from culm.runtime.train_loop import TrainLoop

STEP = 5


class Copies:
    """A shadow replica that has made the steps below STEP - 1. The reduced gradients of that step never arrive."""

    is_empty = False

    def __init__(self) -> None:
        self.requested: list[int] = []

    async def catch_up(self, step: int) -> None:
        self.requested.append(step)
        if step >= STEP:
            await asyncio.Event().wait()


def waiting_loop(monkeypatch: pytest.MonkeyPatch, permit: int) -> tuple[TrainLoop, StepLimits, Copies]:
    """The training loop of a worker that has made the steps below STEP, of which the last two are not committed."""
    copies, limits, unused = Copies(), StepLimits(), SimpleNamespace()
    for name in ("SegmentGradientReducer", "OptimizerStep", "Executor", "OpenStepReplay"):
        monkeypatch.setattr(train_loop, name, lambda *_: unused)
    monkeypatch.setattr(train_loop, "ShadowReplicas", lambda *_: copies)
    monkeypatch.setattr(TrainLoop, "_report_completed_steps", lambda _: None)
    limits.permit(permit)
    limits.commit(STEP - 2, None)
    epoch = SimpleNamespace(keeps_outputs=True, number=1, stop_before=None)
    context: Any = SimpleNamespace(job=unused, epoch=epoch, plan=unused, clock=unused, state=unused)
    writer: Any = unused
    return TrainLoop(context, limits, writer), limits, copies


def test_a_commit_lets_a_worker_continue_while_its_copy_waits_for_gradients_of_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        loop, limits, copies = waiting_loop(monkeypatch, permit=STEP + 1)
        waiting = asyncio.create_task(loop._wait_for_permission(STEP))
        await asyncio.sleep(0)
        assert copies.requested == [STEP - 1], "the commit needs no later step of the copy"
        limits.commit(STEP - 1, None)
        limits.notify()
        assert await asyncio.wait_for(waiting, 60.0)

    asyncio.run(main())


def test_copies_make_all_earlier_steps_while_a_step_is_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader may hold back the permit until the copies have made these steps."""

    async def main() -> None:
        loop, _, copies = waiting_loop(monkeypatch, permit=STEP)
        waiting = asyncio.create_task(loop._wait_for_permission(STEP))
        await asyncio.sleep(0)
        assert copies.requested == [STEP]
        waiting.cancel()

    asyncio.run(main())
