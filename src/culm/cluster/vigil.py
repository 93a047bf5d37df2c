"""Whose worker hangs, or is of no use, though its agent is there. Pure: letters and times in, nodes out.

A worker beats for as long as it lives under an epoch, unless an action keeps it busy; and it answers a halt. One that
does neither for longer than any action takes is as good as gone, and so is its node.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        self.slowest_s = slowest_s
        """The longest action that anybody has told of."""
        self._suspect_after = suspect_after
        self._epoch = 0
        self._signs: dict[int, float] = {}
        """By member of the epoch: when it last beat or, if it has not yet, when it was told of the epoch."""
        self._unheard: set[int] = set()
        """Members that have not beaten in the epoch yet: its letter may still be on its way to them."""
        self._halt = 0
        self._halted_at = 0.0
        self._reported: set[int] = set()
        self._given_up: set[int] = set()
        self.condemned: set[int] = set()
        """All that were ever told to go."""

    @property
    def times(self) -> Timeouts:
        return derive(self._suspect_after, slowest_action=self.slowest_s)

    def expect(self, epoch: int, members: Iterable[int], now: float) -> None:
        """These nodes were told of an epoch, and owe signs in it."""
        self._enter(epoch)
        awaited = [node for node in members if node not in self._signs]
        self._signs.update(dict.fromkeys(awaited, now))
        self._unheard.update(awaited)

    def heard(self, message: Message, now: float) -> None:
        """A letter of a worker."""
        if isinstance(message, Beat) and message.epoch >= max(1, self._epoch):
            self._enter(message.epoch)
            self._signs[message.node] = now
            self._unheard.discard(message.node)
            self.slowest_s = max(self.slowest_s, message.slowest_s)
        elif isinstance(message, Report) and message.epoch >= self._halt:
            if message.epoch > self._halt:
                self._halt, self._halted_at = message.epoch, now
                self._reported.clear()
            self._reported.add(message.node)

    def give_up(self, node: int) -> None:
        """The leader goes on without this one, though it can be heard."""
        self._given_up.add(node)

    def as_good_as_gone(self, now: float) -> list[int]:
        """The nodes that shall go: those given up since the last time, and those whose workers are silent for too
        long."""
        given_up, self._given_up = self._given_up, set()
        found = given_up.union(self.silent(now))
        self.condemned |= found
        return sorted(found)

    def silent(self, now: float) -> list[int]:
        """The nodes whose workers owe a sign for too long: while others beat on, or answered a halt."""
        times = self.times
        if self._halt > self._epoch:
            waits = dict.fromkeys(self._signs.keys() - self._reported, now - self._halted_at)
        else:
            latest = max(self._signs.values(), default=now)
            if now - latest > 3 * times.beat:
                return []  # nobody is heard: the epoch is over, or it is this agent that hears nothing
            waits = {node: latest - at for node, at in self._signs.items()}
        return sorted(node for node, waited in waits.items() if waited > self._patience(node, times))

    def _patience(self, node: int, times: Timeouts) -> float:
        return times.adopt if node in self._unheard else times.progress

    def _enter(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._signs.clear()
            self._unheard.clear()
