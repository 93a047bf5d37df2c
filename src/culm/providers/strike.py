"""Blows on real processes: when its moment comes a node is struck by SIGKILL, agent and worker, and others with it."""

from __future__ import annotations

import collections
import contextlib
import mmap
import os
import signal
import time
from collections.abc import Iterable

from culm.cluster.blows import Kill

_CELL = 16
"""Bytes of a node on the board: two numbers."""
_NODES = 4096
"""More than a run on one machine ever has, with all that come and go."""


class Board:
    """The agents of a run: their process ids, and when they were struck. Make it before they are forked: it lies in
    memory that all of them share, so a node in its last moment needs nobody's help to write there."""

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, _CELL * _NODES)).cast("d")

    def enter(self, node: int, agent: int) -> None:
        self._cells[2 * node] = agent

    def agent(self, node: int) -> int:
        return int(self._cells[2 * node])

    def mark(self, node: int, now: float) -> None:
        self._cells[2 * node + 1] = now

    def struck_at(self, node: int) -> float | None:
        """On the machine's monotonic clock; None: nobody here has struck it."""
        return self._cells[2 * node + 1] or None


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
            self._board.mark(node, time.monotonic())
            with contextlib.suppress(ProcessLookupError):  # an earlier blow was faster
                os.kill(self._board.agent(node), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
