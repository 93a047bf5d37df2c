"""Blows on real processes: when its moment comes a node is struck by SIGKILL, agent and worker, and others with it."""

from __future__ import annotations

import array
import collections
import contextlib
import mmap
import os
import signal
from collections.abc import Iterable

from culm.cluster.blows import Kill
from culm.runtime.clock import real_now

_FIELDS = 2
"""Numbers of a node on the board: the process of its agent, and when it was struck."""
_NODES = 4096
"""More than a run on one machine ever has, with all that come and go."""
_BYTES = 8


class Board:
    """The nodes of a run on one machine: processes, and when they were struck.

    It lies in memory that launcher, nursery and nodes share: a node in its last moment needs nobody's help to write
    there. The launcher makes it; others open it by its descriptor.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        size = _FIELDS * _NODES * _BYTES
        self.descriptor = os.memfd_create("culm-board") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self._cells = memoryview(self._memory).cast("d")

    def close(self) -> None:
        self._cells.release()
        self._memory.close()
        os.close(self.descriptor)

    def enter(self, node: int, agent: int) -> None:
        """A node begins, with nothing known of it."""
        self._cells[_FIELDS * node : _FIELDS * (node + 1)] = array.array("d", [agent, 0.0])

    def agent(self, node: int) -> int:
        return int(self._cells[_FIELDS * node])

    def mark(self, node: int, now: float) -> None:
        """It is struck."""
        self._cells[_FIELDS * node + 1] = now

    def struck_at(self, node: int) -> float | None:
        """None: nobody here has struck it."""
        return self._cells[_FIELDS * node + 1] or None


class Striker:
    """Strikes in one process, agent or worker, when it reaches the moment of a kill. Never returns from that."""

    def __init__(self, kills: Iterable[str], board: Board) -> None:
        self._kills = [Kill.parse(kill) for kill in kills]
        self._board = board
        self._times: collections.Counter[int] = collections.Counter()

    def reached(self, node: int, step: int, action: str) -> None:
        """The node has done an action and nobody has heard of it yet."""
        for number, kill in enumerate(self._kills):
            if kill.matches(node, step, action):
                self._times[number] += 1
                if self._times[number] == kill.nth:
                    self._strike([*(other for other in kill.nodes if other != node), node])

    def struck_at(self, node: int) -> float | None:
        return self._board.struck_at(node)

    def _strike(self, nodes: Iterable[int]) -> None:
        """A worker ends with its agent. The last of the nodes is the one that this process belongs to."""
        for node in nodes:
            self._board.mark(node, real_now())
            with contextlib.suppress(ProcessLookupError):  # an earlier blow was faster
                os.kill(self._board.agent(node), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
