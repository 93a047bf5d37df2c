"""Processes with one Gloo group among them, commanded over pipes.

They end when their pipe does: by `close`, by an interrupt, or because this process died. The environment they see
holds nothing that would tune torch, Gloo or OpenMP, and they sit in a session of their own, so that Ctrl-C reaches this
process alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.pinned import pin
from culm.errors import PlanError, RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TUNING = ("TORCH", "PYTORCH", "GLOO", "NCCL", "OMP_", "KMP_", "MKL_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE")


class Unavailable(PlanError):
    """torch can not run what was asked; the sentence is torch's own."""


class Ranks:
    """`workers` processes in one Gloo group over loopback. After a RunError they are closed."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise UsageError(f"workers is {workers}: use at least 1")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._wires: list[connection.Connection[Any, Any]] = []
        try:
            for _ in range(workers):
                self._start()  # they import torch while the store, and its threads, come up
            # The store lives here, on a port that the system chose: no race for a free one, no file to remove.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank, wire in enumerate(self._wires):
                wire.send((rank, workers, self._store.port))
            self._gather("start")
            pin(self.pids)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def ask(self, command: str, *arguments: object) -> list[Any]:
        """Give every rank the command and wait for all answers, in rank order.

        Unavailable: torch refused, the ranks are as good as before. RunError: a rank failed or died, all are gone.
        """
        if not self._wires:
            raise RunError(f"the torch pipeline is closed and can not {command}: start another")
        try:
            for rank in range(len(self._wires)):
                self._send(rank, command, arguments)
            return self._gather(command)
        except (RunError, KeyboardInterrupt):
            self.close()
            raise

    def close(self) -> None:
        """End the processes at once: they hold nothing worth saving. Closing twice is fine."""
        for wire in self._wires:
            wire.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._wires.clear()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.rank", str(theirs.fileno())],
                env=clean_environment(os.environ, sys.path),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes.append(process)
        self._wires.append(ours)

    def _gather(self, command: str) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        waiting = set(range(len(self._wires)))
        while waiting:
            ready = connection.wait([self._wires[rank] for rank in waiting])
            for rank in [rank for rank in waiting if self._wires[rank] in ready]:
                answers[rank] = self._receive(rank, command)
                waiting.remove(rank)
        for kind, value in answers.values():
            if kind == "refused":
                raise Unavailable(f"torch can not run this pipeline: {value}")
        return [answers[rank][1] for rank in sorted(answers)]

    def _send(self, rank: int, command: str, arguments: tuple[object, ...]) -> None:
        try:
            self._wires[rank].send((command, *arguments))
        except ConnectionError:
            raise RunError(f"rank {rank} of the torch pipeline died before {command!r}") from None

    def _receive(self, rank: int, command: str) -> tuple[str, Any]:
        """The answer of one rank. A failure is raised at once: the others may wait for this rank for ever."""
        try:
            kind, value = self._wires[rank].recv()
        except (EOFError, ConnectionError):
            raise RunError(f"rank {rank} of the torch pipeline died during {command!r}") from None
        if kind == "failed":
            error = RunError(f"rank {rank} of the torch pipeline failed in {command!r}: {value.splitlines()[-1]}")
            error.add_note(value)
            raise error
        return kind, value


def clean_environment(environment: Mapping[str, str], path: Sequence[str]) -> dict[str, str]:
    """What a rank sees: no setting that would tune the measurement, loopback for Gloo, and our own import path."""
    kept = {name: value for name, value in environment.items() if not name.startswith(TUNING)}
    return kept | {
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in path),
    }
