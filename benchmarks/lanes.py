"""Runs side by side, each in a nursery of its own. With emulated compute workers sleep, so that cores are idle; a run
with real compute has all of them to itself."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeVar

from culm.providers.local import LocalNursery

T = TypeVar("T")


class Lanes:
    """So many runs at once. The first lane is a nursery of the caller, who closes it."""

    def __init__(self, first: LocalNursery, count: int) -> None:
        self._stack = ExitStack()
        self._idle: queue.SimpleQueue[LocalNursery] = queue.SimpleQueue()
        self._idle.put(first)
        for _ in range(count - 1):
            self._idle.put(self._stack.enter_context(LocalNursery()))
        self._threads = self._stack.enter_context(ThreadPoolExecutor(count))

    def map(self, works: Sequence[Callable[[LocalNursery], T]]) -> list[T]:
        """What each gives, in their order; they begin in it, too. Raises what the first of them raised."""
        begun = [self._threads.submit(self._run, work) for work in works]
        try:
            return [one.result() for one in begun]
        finally:
            for one in begun:
                one.cancel()

    def _run(self, work: Callable[[LocalNursery], T]) -> T:
        nursery = self._idle.get()
        try:
            return work(nursery)
        finally:
            self._idle.put(nursery)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
