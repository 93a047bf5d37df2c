"""Parallel runs, each in its own fork server. With emulated compute workers sleep, so that cores are idle; a run with
real compute has all cores to itself."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

from culm.providers.local_provider import ForkServerClient

T = TypeVar("T")


class ParallelRuns:
    """Runs up to `count` tasks at once. The first fork server is the caller's, who closes it."""

    def __init__(self, fork_server: ForkServerClient, count: int) -> None:
        self._stack = ExitStack()
        self._idle_fork_servers: queue.SimpleQueue[ForkServerClient] = queue.SimpleQueue()
        self._idle_fork_servers.put(fork_server)
        for _ in range(count - 1):
            self._idle_fork_servers.put(self._stack.enter_context(ForkServerClient()))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(count))

    def run_all(self, tasks: Sequence[Callable[[ForkServerClient], T]]) -> list[T]:
        """The results in the order of the tasks, which also start in this order. Raises the first task's error."""
        futures = [self._threads.submit(self._run, task) for task in tasks]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def _run(self, task: Callable[[ForkServerClient], T]) -> T:
        fork_server = self._idle_fork_servers.get()
        try:
            return task(fork_server)
        finally:
            self._idle_fork_servers.put(fork_server)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
