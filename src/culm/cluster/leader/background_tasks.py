"""Background tasks: coroutines that run beside the leader's loop until they end or the leader does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from culm.errors import CulmError, unexpected_failure


class BackgroundTasks:
    """Holds tasks that nobody waits for. An unexpected exception of one is reported as an error that ends the run."""

    def __init__(self, on_error: Callable[[CulmError], None]) -> None:
        self._on_error = on_error
        self._tasks: dict[asyncio.Task[None], None] = {}
        """Tasks that have not ended, in the order in which they were started."""

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine beside the others."""
        task = asyncio.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._handle_end)
        return task

    def _handle_end(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, CulmError):  # a store that is lost is reported by its watch
            self._on_error(unexpected_failure("the leader", error))

    def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel the tasks that have not ended, and wait until they have."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
