"""Kill injection: a node that reaches the action of a kill sends SIGKILL to the nodes of the kill and to itself."""

from __future__ import annotations

import array
import collections
import contextlib
import mmap
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from culm.cluster.node_faults import KillNode
from culm.runtime.clock import real_now

_MPS_PIPES_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
_DEFAULT_MPS_PIPE = Path("/tmp/nvidia-mps/control")
_FIELDS = 2
"""Values per node: process id of its agent, and time at which it was killed."""
_NODES = 4096
"""Upper bound of node numbers of a run on one machine."""
_BYTES = 8


def finish_device_work() -> None:
    """Before this process is killed: wait for its GPU, if that is shared through MPS. A client of MPS that dies while a
    kernel runs takes all other clients with it."""
    torch = sys.modules.get("torch")
    if torch is not None and uses_mps() and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()


def uses_mps() -> bool:
    """Whether processes of this machine share GPUs through CUDA MPS."""
    return _MPS_PIPES_VARIABLE in os.environ or _DEFAULT_MPS_PIPE.exists()


class ProcessTable:
    """Process ids of the nodes on one machine, and times at which they were killed.

    It is in memory shared by the supervisor, the fork server and the nodes, so that a node can write to it right before
    it is killed. The supervisor creates it; other processes open it by its descriptor.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        size = _FIELDS * _NODES * _BYTES
        self.descriptor = os.memfd_create("culm-kills") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, size)
        self._memory = mmap.mmap(self.descriptor, size)
        self._cells = memoryview(self._memory).cast("d")

    def close(self) -> None:
        self._cells.release()
        self._memory.close()
        os.close(self.descriptor)

    def add_node(self, node: int, agent: int) -> None:
        """Register a node that was started."""
        self._cells[_FIELDS * node : _FIELDS * (node + 1)] = array.array("d", [agent, 0.0])

    def agent_pid(self, node: int) -> int:
        return int(self._cells[_FIELDS * node])

    def mark_killed(self, node: int, now: float) -> None:
        """Record that a node is being killed."""
        self._cells[_FIELDS * node + 1] = now

    def killed_at(self, node: int) -> float | None:
        """When the node was killed by a kill injection; None: it was not."""
        return self._cells[_FIELDS * node + 1] or None


class KillInjector:
    """Kills the nodes of a kill when this process, an agent or a worker, reaches its action. Does not return then."""

    def __init__(self, kills: Iterable[str], process_table: ProcessTable) -> None:
        self._kills = [KillNode.parse(kill) for kill in kills]
        self._process_table = process_table
        self._match_counts: collections.Counter[int] = collections.Counter()

    def on_action_done(self, node: int, step: int, action: str) -> None:
        """Called when the node has done an action, before its output is sent."""
        for number, kill in enumerate(self._kills):
            if kill.is_overdue(node, step, action):
                self._kill_nodes([*(other for other in kill.nodes if other != node), node])
            if kill.matches(node, step, action):
                self._match_counts[number] += 1
                if self._match_counts[number] == kill.nth:
                    self._kill_nodes([*(other for other in kill.nodes if other != node), node])

    def killed_at(self, node: int) -> float | None:
        return self._process_table.killed_at(node)

    def _kill_nodes(self, nodes: Iterable[int]) -> None:
        """Kill agents; workers end with their agents. The last node is that of this process."""
        finish_device_work()
        for node in nodes:
            self._process_table.mark_killed(node, real_now())
            with contextlib.suppress(ProcessLookupError):  # killed already
                os.kill(self._process_table.agent_pid(node), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
