"""Tasks beside the leader's loop."""

from __future__ import annotations

import asyncio

from culm.cluster.leader.background_tasks import BackgroundTasks
from culm.errors import CulmError, RunError


def test_a_task_that_begins_while_the_leader_closes_does_not_keep_it_from_ending() -> None:
    """For example the watch of a storage that fails when the last lines are written."""
    errors: list[CulmError] = []

    async def main() -> None:
        tasks = BackgroundTasks(errors.append)
        tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
        tasks.cancel()
        tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
        await tasks.close()
        assert len(tasks) == 0

    asyncio.run(main())
    assert errors == []


def test_only_an_unexpected_exception_is_reported() -> None:
    errors: list[CulmError] = []

    async def fail(error: Exception) -> None:
        raise error

    async def main() -> None:
        tasks = BackgroundTasks(errors.append)
        await asyncio.gather(
            *(tasks.start(fail(error)) for error in (ValueError("a defect"), RunError("no store"))),
            return_exceptions=True,
        )
        await asyncio.sleep(0)

    asyncio.run(main())
    (error,) = errors
    assert str(error).startswith("the leader failed: ValueError: a defect")
