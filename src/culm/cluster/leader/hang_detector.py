"""Hang detector: finds nodes whose worker hangs although their agent is alive. Pure: messages and times in, nodes out.

A worker sends heartbeats while it is in an epoch, except during a long action, and it answers a halt. A worker that
does neither for longer than any action takes counts as lost, together with its node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from culm.cluster.timeouts import derive_timeouts
from culm.runtime.messages import HaltReport, Heartbeat

if TYPE_CHECKING:
    from culm.cluster.timeouts import Timeouts
    from culm.runtime.messages import Message


_STANDSTILL_BEATS = 3
"""The agent looks for hung nodes once per beat. After a pause of this many beats it stood still itself."""


class HangDetector:
    """Kept by the agent of the leader's node, which sees every message to the leader."""

    def __init__(self, suspect_after: float, slowest_action_s: float, *, workers_per_node: int = 1) -> None:
        """`slowest_action_s`: the longest action known before the run."""
        self._workers_per_node = workers_per_node
        self.slowest_action_s = slowest_action_s
        """The longest action that any worker has reported."""
        self._suspect_after = suspect_after
        self._epoch = 0
        self._last_heartbeat_at: dict[int, float] = {}
        """By worker of the epoch: time of its last heartbeat, or of the epoch's publication before the first one."""
        self._without_heartbeat: set[int] = set()
        """Workers without a heartbeat in this epoch: they may not have received it yet."""
        self._halt_epoch = 0
        self._halted_at = 0.0
        self._reported_workers: set[int] = set()
        self._checked_at: float | None = None
        """When hung nodes were last looked for."""
        self._evict_next: set[int] = set()
        self.evicted_nodes: set[int] = set()
        """All nodes that `take_nodes_to_evict` ever returned."""

    @property
    def timeouts(self) -> Timeouts:
        return derive_timeouts(self._suspect_after, slowest_action=self.slowest_action_s)

    def expect_heartbeats(self, epoch: int, members: Iterable[int], now: float) -> None:
        """Expect heartbeats of an epoch from these workers, counted from now."""
        self._enter_epoch(epoch)
        awaited = [worker for worker in members if worker not in self._last_heartbeat_at]
        self._last_heartbeat_at.update(dict.fromkeys(awaited, now))
        self._without_heartbeat.update(awaited)

    def handle_message(self, message: Message, now: float) -> None:
        """Take note of a worker's heartbeat or halt report."""
        if isinstance(message, Heartbeat) and message.epoch >= max(1, self._epoch):
            self._enter_epoch(message.epoch)
            self._last_heartbeat_at[message.worker] = now
            self._without_heartbeat.discard(message.worker)
            self.slowest_action_s = max(self.slowest_action_s, message.slowest_action_s)
        elif isinstance(message, HaltReport) and message.epoch >= self._halt_epoch:
            if message.epoch > self._halt_epoch:
                self._halt_epoch, self._halted_at = message.epoch, now
                self._reported_workers.clear()
            self._reported_workers.add(message.worker)

    def request_eviction(self, node: int) -> None:
        """Evict a node although its worker is alive, because the leader continues without it."""
        self._evict_next.add(node)

    def take_nodes_to_evict(self, now: float) -> list[int]:
        """The nodes to evict now: those requested since the last call, and those whose workers hang."""
        given_up, self._evict_next = self._evict_next, set()
        self._excuse_standstill(now)
        found = given_up.union(self.hung_nodes(now))
        self.evicted_nodes |= found
        return sorted(found)

    def _excuse_standstill(self, now: float) -> None:
        """If this agent itself stood still since the last check, heartbeats may wait to be read: count all times from
        now."""
        before, self._checked_at = self._checked_at, now
        if before is not None and now - before > _STANDSTILL_BEATS * self.timeouts.heartbeat:
            self._last_heartbeat_at = dict.fromkeys(self._last_heartbeat_at, now)
            self._halted_at = now

    def hung_nodes(self, now: float) -> list[int]:
        """The nodes with a worker that is silent for too long while others send heartbeats, or have answered a halt."""
        times = self.timeouts
        if self._halt_epoch > self._epoch:
            waits = dict.fromkeys(self._last_heartbeat_at.keys() - self._reported_workers, now - self._halted_at)
        else:
            latest = max(self._last_heartbeat_at.values(), default=now)
            if now - latest > 3 * times.heartbeat:
                return []  # no worker sends heartbeats: the epoch is over, or this agent is cut off
            waits = {worker: latest - at for worker, at in self._last_heartbeat_at.items()}
        hung = [worker for worker, waited in waits.items() if waited > self._allowed_silence_s(worker, times)]
        return sorted({worker // self._workers_per_node for worker in hung})

    def _allowed_silence_s(self, worker: int, timeouts: Timeouts) -> float:
        return timeouts.adopt if worker in self._without_heartbeat else timeouts.progress

    def _enter_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            self._last_heartbeat_at.clear()
            self._without_heartbeat.clear()
