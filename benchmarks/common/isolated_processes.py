"""Run several measurements at once on a machine with many cores, each in a process with its own cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection, get_context
from typing import Any, Generic, Self, TypeVar

from culm.errors import RunError

T = TypeVar("T")
# Spawned: a child must not inherit the threads and process groups of a parent that has measured before.
_SPAWN = get_context("spawn")


@dataclass(frozen=True)
class IsolatedTask(Generic[T]):
    """A measurement that needs `cores` cores; `call` must be picklable."""

    cores: int
    call: Callable[[], T]


def run_isolated(
    tasks: Sequence[IsolatedTask[T]], cores: Sequence[int], on_result: Callable[[T], object] = lambda _: None
) -> list[T]:
    """Run the tasks and return their results in order; `on_result` is called as soon as each is known.

    The first task that finds enough free cores starts; one that needs more cores than there are gets all of them.
    Raises the error of a task and terminates the others.
    """
    results: dict[int, T] = {}
    with _CorePool(cores) as pool:
        waiting = dict(enumerate(tasks))
        while len(results) < len(tasks):
            for number, task in list(waiting.items()):
                if pool.start(number, task):
                    del waiting[number]
            for number, value in pool.wait_for_results():
                results[number] = value
                on_result(value)
    return [results[number] for number in range(len(tasks))]


class _CorePool:
    """The free cores, and the processes that run on the others."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._core_count = len(cores)
        self._free_cores = list(cores)
        self._running: dict[connection.Connection[Any, Any], tuple[int, list[int], Any]] = {}

    def start(self, number: int, task: IsolatedTask[T]) -> bool:
        """Start the task if there are enough free cores; returns whether it was started."""
        need = min(task.cores, self._core_count)
        if need > len(self._free_cores):
            return False
        cores, self._free_cores = self._free_cores[:need], self._free_cores[need:]
        receiver, sender = _SPAWN.Pipe(duplex=False)
        process = _SPAWN.Process(target=_run_on_cores, args=(task.call, cores, sender))
        process.start()
        sender.close()
        self._running[receiver] = number, cores, process
        return True

    def wait_for_results(self) -> list[tuple[int, Any]]:
        """Wait for at least one result: (task number, result) pairs."""
        return [
            self._collect_result(receiver)
            for receiver in connection.wait(list(self._running))
            if isinstance(receiver, connection.Connection)
        ]

    def _collect_result(self, receiver: connection.Connection[Any, Any]) -> tuple[int, Any]:
        number, cores, process = self._running.pop(receiver)
        try:
            error, value = receiver.recv()
        except EOFError:
            process.join()
            raise RunError(f"a measurement ended with exit code {process.exitcode} and no result") from None
        finally:
            receiver.close()
        process.join()
        self._free_cores += cores
        if error is not None:
            raise error
        return number, value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for receiver, (_, _, process) in self._running.items():
            process.terminate()  # its child processes end with it
            process.join()
            receiver.close()


def _run_on_cores(call: Callable[[], object], cores: Sequence[int], sender: connection.Connection[Any, Any]) -> None:
    os.sched_setaffinity(0, cores)
    try:
        sender.send((None, call()))
    except Exception as error:
        sender.send((error, None))
