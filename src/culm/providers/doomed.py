"""Nodes that die on purpose (`culm run --kill`): at the very action, by SIGKILL, as a machine that is taken away."""

from __future__ import annotations

import collections
import os
import signal
from collections.abc import Sequence

from culm.cluster.blows import Kill
from culm.runtime.clock import RealClock


def clock(kills: Sequence[str], other: int) -> RealClock:
    """The clock of an agent or a worker; `other` is the process of the node's worker, or of its agent."""
    return DoomedClock([Kill.parse(text) for text in kills], other) if kills else RealClock()


class DoomedClock(RealClock):
    """The machine's clock, where both processes of a node end at the moment of a kill. What the action made has gone
    nowhere then, and nothing is tidied up."""

    def __init__(self, kills: Sequence[Kill], other: int) -> None:
        self._kills, self._other = kills, other
        self._times: collections.Counter[Kill] = collections.Counter()

    async def work(self, node: int, step: int, action: str) -> None:
        for kill in self._kills:
            if kill.matches(node, step, action):
                self._times[kill] += 1
                if self._times[kill] == kill.nth:
                    self._die()

    def _die(self) -> None:
        for pid in (self._other, os.getpid()):
            os.kill(pid, signal.SIGKILL)
