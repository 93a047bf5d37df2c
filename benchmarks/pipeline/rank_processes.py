"""Processes that form one group, of Gloo or NCCL, and are controlled over pipes.

They end when their pipe is closed: by `close`, by an interrupt, or because this process died. Their environment has no
variable that would tune torch, Gloo or OpenMP. Each has its own process group, so that Ctrl-C reaches only this
process, but no session of its own: Linux gives every session an equal share of a busy machine
(`sched_autogroup_enabled`), and all nodes of culm's side are in one session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.common.cpu_pinning import pin_processes
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from culm.errors import PlanError, RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TUNING_PREFIXES = (
    "TORCH",
    "PYTORCH",
    "GLOO",
    "NCCL",
    "OMP_",
    "KMP_",
    "MKL_",
    "MASTER_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
)


class TorchUnavailable(PlanError):
    """torch cannot run the requested pipeline; the message is torch's own."""


class RankProcesses:
    """`workers` processes in one group over loopback: Gloo on the CPU, NCCL on GPUs. Closed after a RunError."""

    def __init__(self, workers: int, device: str = "cpu") -> None:
        if workers < 1:
            raise UsageError(f"workers is {workers}: use at least 1")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[connection.Connection[Any, Any]] = []
        try:
            for _ in range(workers):
                self._start_process()  # they import torch while the store and its threads start
            # The store is in this process, on a port chosen by the system: no race for a free port, no file to remove.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            for rank, pipe in enumerate(self._connections):
                pipe.send((rank, workers, self._store.port, device))
            self._gather_answers("start")
            if device == "cpu":  # with a GPU the threads of NCCL, which are started later, would share the core
                pin_processes(self.pids)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    def call_all(self, command: str, *arguments: object) -> list[Any]:
        """Send every rank the command and wait for all answers, in rank order.

        Raises TorchUnavailable if torch refuses (the ranks stay usable), RunError if a rank failed or died (all ranks
        are closed).
        """
        if not self._connections:
            raise RunError(f"the torch pipeline is closed and cannot {command}: start another")
        try:
            for rank in range(len(self._connections)):
                self._send(rank, command, arguments)
            return self._gather_answers(command)
        except (RunError, KeyboardInterrupt):
            self.close()
            raise

    def close(self) -> None:
        """Kill the processes at once: they hold nothing worth saving. May be called twice."""
        for pipe in self._connections:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._connections.clear()
        self._processes.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start_process(self) -> None:
        parent_end, child_end = Pipe()
        with child_end:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.pipeline.torch_rank", str(child_end.fileno())],
                env=clean_environment(os.environ, sys.path),
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
        self._processes.append(process)
        self._connections.append(parent_end)

    def _gather_answers(self, command: str) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        waiting = set(range(len(self._connections)))
        while waiting:
            ready = connection.wait([self._connections[rank] for rank in waiting])
            for rank in [rank for rank in waiting if self._connections[rank] in ready]:
                answers[rank] = self._receive(rank, command)
                waiting.remove(rank)
        for kind, value in answers.values():
            if kind == "refused":
                raise TorchUnavailable(f"torch cannot run this pipeline: {value}")
        return [answers[rank][1] for rank in sorted(answers)]

    def _send(self, rank: int, command: str, arguments: tuple[object, ...]) -> None:
        try:
            self._connections[rank].send((command, *arguments))
        except ConnectionError:
            raise RunError(f"rank {rank} of the torch pipeline died before {command!r}") from None

    def _receive(self, rank: int, command: str) -> tuple[str, Any]:
        """The answer of one rank. A failure is raised at once: the other ranks may wait for this one forever."""
        try:
            kind, value = self._connections[rank].recv()
        except (EOFError, ConnectionError):
            raise RunError(f"rank {rank} of the torch pipeline died during {command!r}") from None
        if kind == "failed":
            error = RunError(f"rank {rank} of the torch pipeline failed in {command!r}: {value.splitlines()[-1]}")
            error.add_note(value)
            raise error
        return kind, value


def clean_environment(environment: Mapping[str, str], path: Sequence[str]) -> dict[str, str]:
    """The environment of a rank: no variables that tune the measurement, loopback for Gloo, and our import path."""
    kept = {name: value for name, value in environment.items() if not name.startswith(TUNING_PREFIXES)}
    return kept | {
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(str(Path(entry).resolve()) for entry in path),
    }
