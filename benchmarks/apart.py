"""Several measurements at once on a machine of many cores, each in a process that has cores of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any, Generic, Self, TypeVar

from culm.errors import RunError

T = TypeVar("T")
# Spawned: a child must not inherit the threads and the groups of a parent that has measured before.
_SPAWN = get_context("spawn")


@dataclass(frozen=True)
class Work(Generic[T]):
    """Something to measure, on so many cores; it must be possible to pickle the call."""

    cores: int
    call: Callable[[], T]


def apart(works: Sequence[Work[T]], cores: Sequence[int], told: Callable[[T], object] = lambda _: None) -> list[T]:
    """What each gives, in their order; `told` hears of it as soon as it is known. The first that finds cores enough
    begins; one that needs more than there are has all of them. Raises what one raises, and ends the others."""
    found: dict[int, T] = {}
    with _Machine(cores) as machine:
        waiting = dict(enumerate(works))
        while len(found) < len(works):
            for number, work in list(waiting.items()):
                if machine.start(number, work):
                    del waiting[number]
            for number, value in machine.ended():
                found[number] = value
                told(value)
    return [found[number] for number in range(len(works))]


class _Machine:
    """Its cores: which are free, and what runs on the others."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._all = len(cores)
        self._free = list(cores)
        self._running: dict[connection.Connection[Any, Any], tuple[int, list[int], Any]] = {}

    def start(self, number: int, work: Work[T]) -> bool:
        """Whether there was room for it."""
        need = min(work.cores, self._all)
        if need > len(self._free):
            return False
        mine, self._free = self._free[:need], self._free[need:]
        ours, theirs = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=_bound, args=(work.call, mine, theirs))
        process.start()
        theirs.close()
        self._running[ours] = number, mine, process
        return True

    def ended(self) -> list[tuple[int, Any]]:
        """Wait for one at least: its number, and what it gave."""
        return [
            self._end(wire) for wire in connection.wait(list(self._running)) if isinstance(wire, connection.Connection)
        ]

    def _end(self, wire: connection.Connection[Any, Any]) -> tuple[int, Any]:
        number, mine, process = self._running.pop(wire)
        try:
            error, value = wire.recv()
        except EOFError:
            process.join()
            raise RunError(f"a measurement ended with exit code {process.exitcode} and no result") from None
        finally:
            wire.close()
        process.join()
        self._free += mine
        if error is not None:
            raise error
        return number, value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for wire, (_, _, process) in self._running.items():
            process.terminate()  # what it has started ends with it
            process.join()
            wire.close()


def _bound(call: Callable[[], object], cores: Sequence[int], wire: connection.Connection[Any, Any]) -> None:
    os.sched_setaffinity(0, cores)
    try:
        wire.send((None, call()))
    except Exception as error:
        wire.send((error, None))
