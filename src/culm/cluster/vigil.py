"""Whose worker hangs, though its agent is there. Pure: letters and times in, nodes out.

A worker beats for as long as its epoch is trained under, unless an action keeps it busy; and it answers a halt. One
that does neither for longer than any action takes is as good as gone, and so is its node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.cluster.timeouts import derive
from culm.runtime.epoch import Beat, Report

if TYPE_CHECKING:
    from culm.cluster.timeouts import Timeouts
    from culm.runtime.epoch import Message


class Vigil:
    """Kept by the agent that leads: it sees every letter to the leader."""

    def __init__(self, suspect_after: float, slowest_s: float) -> None:
        """`slowest_s`: the longest action that is known of beforehand."""
        self._suspect_after, self._slowest_s = suspect_after, slowest_s
        self._epoch = 0
        self._beats: dict[int, float] = {}
        """By node: when it last beat in the epoch."""
        self._halt = 0
        self._halted_at = 0.0
        self._reported: set[int] = set()

    @property
    def times(self) -> Timeouts:
        return derive(self._suspect_after, slowest_action=self._slowest_s)

    def heard(self, message: Message, now: float) -> None:
        """A letter of a worker."""
        if isinstance(message, Beat) and message.epoch >= max(1, self._epoch):
            if message.epoch > self._epoch:
                self._epoch = message.epoch
                self._beats.clear()
            self._beats[message.node] = now
            self._slowest_s = max(self._slowest_s, message.slowest_s)
        elif isinstance(message, Report) and message.epoch >= self._halt:
            if message.epoch > self._halt:
                self._halt, self._halted_at = message.epoch, now
                self._reported.clear()
            self._reported.add(message.node)

    def silent(self, now: float) -> list[int]:
        """The nodes whose workers owe a sign for too long: while others beat on, or answered a halt."""
        times = self.times
        if self._halt > self._epoch:
            late = now - self._halted_at > times.progress
            return sorted(self._beats.keys() - self._reported) if late else []
        latest = max(self._beats.values(), default=now)
        if now - latest > 3 * times.beat:
            return []  # nobody is heard: the epoch is over, or it is this agent that hears nothing
        return sorted(node for node, at in self._beats.items() if latest - at > times.progress)
