"""Real faults of a run on this machine: signals to its processes, storage that fails, bits that flip.

All randomness comes from a seed. Which process a fault hits also depends on timing, as in production.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import resource
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from culm.soak.process_samples import child_pids

if TYPE_CHECKING:
    from culm.providers.local_provider import ForkServerClient
    from culm.providers.run_handle import RunHandle

_WEIGHTS = {
    "kill a node": 6,
    "kill the leader": 3,
    "kill a worker": 2,
    "stop a node briefly": 3,
    "stop a node beyond its lease": 2,
    "notice": 2,
    "kill etcd": 1,
    "stop etcd": 1,
    "stop the fork server": 1,
    "storage unavailable": 2,
    "full disk": 2,
    "flip a bit": 1,
}
_LETHAL = ("kill a node", "kill the leader", "kill a worker", "stop a node beyond its lease", "notice", "flip a bit")
_SPARED = 2
_SPARED_LEADER = 0.9
"""How often a kill of the leader does nothing if a spared node leads."""
_NOTICE_S = 10.0
_NODES_WAIT_S = 20.0
_COMPARISON_S = 60.0
"""How long to wait for the checkpoint at which a flipped bit is found."""
_POLL_S = 0.1


class RealFaults:
    """Injects faults into a run, one after the other, and keeps the number of its nodes."""

    def __init__(
        self,
        run: RunHandle,
        fork_server: ForkServerClient,
        *,
        nodes: int,
        disk: Path,
        flip_file: Path,
        lease_s: float,
        seed: int,
        committed_steps: Callable[[], int],
        steps_between_checkpoints: int,
    ) -> None:
        """`disk` is a symbolic link to the folder of the run. `lease_s`: seconds after which a silent node is lost."""
        self._committed_steps, self._steps_between_checkpoints = committed_steps, steps_between_checkpoints
        self._run, self._fork_server, self._nodes, self._lease_s = run, fork_server, nodes, lease_s
        self._disk, self._flip_file = disk, flip_file
        self._dice = random.Random(seed)
        self._spared: set[int] = set()
        """Nodes that are not lost, so that their memory can be observed for long."""
        self._actions: dict[str, Callable[[], Awaitable[bool]]] = {
            "kill a node": self._kill_node,
            "kill the leader": self._kill_leader,
            "kill a worker": self._kill_worker,
            "stop a node briefly": self._stop_node_briefly,
            "stop a node beyond its lease": self._stop_node_for_long,
            "notice": self._give_notice,
            "kill etcd": self._kill_etcd,
            "stop etcd": self._stop_etcd,
            "stop the fork server": self._stop_fork_server,
            "storage unavailable": self._take_storage_away,
            "full disk": self._fill_disk,
            "flip a bit": self._flip_bit,
        }
        """Each carries out a fault and undoes it; False: there is no process for it right now."""
        self.counts: collections.Counter[str] = collections.Counter()
        """How often each kind of fault was injected."""
        self.log: list[tuple[float, str]] = []
        """(time by the event loop, kind)."""

    async def inject_every(self, low_s: float, high_s: float) -> None:
        """Inject faults, with a random time between two of them, until cancelled. Effects are undone then."""
        kinds = list(_WEIGHTS)
        queue: list[str] = []
        while True:
            await asyncio.sleep(self._dice.uniform(low_s, high_s))
            if not queue:  # every kind occurs early, also in a short run
                queue = self._dice.sample(kinds, len(kinds))
                queue += self._dice.choices(kinds, list(_WEIGHTS.values()), k=2 * len(kinds))
            await self._inject(queue.pop(0))

    async def _inject(self, kind: str) -> None:
        self._spare_others()
        if kind in _LETHAL:
            await self._wait_for_nodes()
        if await self._actions[kind]():
            self.counts[kind] += 1
            self.log.append((asyncio.get_running_loop().time(), kind))

    def _spare_others(self) -> None:
        """Replace lost nodes among the spared ones by those that have run for longest."""
        running = self._run.nodes.running
        self._spared &= running
        others = sorted(node for node in running - self._spared if node != self._run.leader)
        self._spared.update(others[: _SPARED - len(self._spared)])

    async def _wait_for_nodes(self) -> None:
        """Wait until most slots are filled: what is tested are losses that a cluster with free nodes survives."""
        missing = self._nodes - len(self._run.nodes.running)
        if missing > 0:
            await self._run.nodes.start(missing)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NODES_WAIT_S):
                await self._run.wait_until_slots_filled()

    async def _kill_node(self) -> bool:
        return await self._end_node(self._pick_node())

    async def _kill_leader(self) -> bool:
        """Kill the leader. If a spared node leads, the kill usually does nothing."""
        leader = self._run.leader
        if leader in self._spared and self._dice.random() < _SPARED_LEADER:
            return False
        return await self._end_node(leader)

    async def _give_notice(self) -> bool:
        return await self._end_node(self._pick_node(), _NOTICE_S)

    async def _kill_worker(self) -> bool:
        _, *workers = self._node_processes() or [0]
        with contextlib.suppress(ProcessLookupError):
            for worker in workers[:1]:
                os.kill(worker, signal.SIGKILL)
                return True
        return False

    async def _stop_node_briefly(self) -> bool:
        return await self._stop(self._node_processes(), self._dice.uniform(0.1, 0.5 * self._lease_s))

    async def _stop_node_for_long(self) -> bool:
        return await self._stop(self._node_processes(), self._lease_s + self._dice.uniform(1.0, 3.0))

    async def _stop_fork_server(self) -> bool:
        return await self._stop([self._fork_server.pid], self._dice.uniform(0.5, 2.0))

    async def _stop_etcd(self) -> bool:
        return await self._stop(self._etcd_process(), self._dice.uniform(0.3, 0.5 * self._lease_s))

    async def _kill_etcd(self) -> bool:
        found = self._etcd_process()
        _signal_all(found, signal.SIGKILL)
        return bool(found)

    async def _take_storage_away(self) -> bool:
        with self._unavailable():
            await asyncio.sleep(self._dice.uniform(0.3, 3.0))
        return True

    async def _fill_disk(self) -> bool:
        with self._full():
            await asyncio.sleep(self._dice.uniform(0.3, 3.0))
        return True

    async def _flip_bit(self) -> bool:
        """Flip a bit, and wait until the node has been compared with others: a fault of a node that is lost before
        cannot be found."""
        agent, *workers = self._node_processes() or [0]
        if not workers:
            return False
        named = self._flip_file.with_suffix(".new")
        named.write_text(str(workers[0]))
        named.replace(self._flip_file)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_COMPARISON_S):
                while self._flip_file.exists():
                    await asyncio.sleep(_POLL_S)
                compared = self._committed_steps() + 2 * self._steps_between_checkpoints
                while agent in child_pids(self._fork_server.pid) and self._committed_steps() < compared:
                    await asyncio.sleep(_POLL_S)
        self._flip_file.unlink(missing_ok=True)  # its process has ended before its next step
        return True

    def _etcd_process(self) -> list[int]:
        etcd = self._fork_server.private_etcd
        return [etcd.pid] if etcd is not None and etcd.running else []

    def _pick_node(self) -> int | None:
        """A random node that is not spared; None: there is none."""
        running = sorted(self._run.nodes.running - self._spared)
        return self._dice.choice(running) if running else None

    async def _end_node(self, node: int | None, notice_s: float = 0.0) -> bool:
        """End a node, and start a new one in its place."""
        if node is None or node not in self._run.nodes.running:
            return False
        self._run.nodes.stop(node, notice_s)
        await self._run.nodes.start()
        return True

    def _node_processes(self) -> list[int]:
        """The agent of a random node and its workers; empty: no node runs."""
        node = self._pick_node()
        agent = 0 if node is None else self._fork_server.process_table.agent_pid(node)
        return [agent, *child_pids(agent)] if agent in child_pids(self._fork_server.pid) else []

    async def _stop(self, processes: Sequence[int], seconds: float) -> bool:
        """Stop processes for a while."""
        if not processes:
            return False
        try:
            _signal_all(processes, signal.SIGSTOP)
            await asyncio.sleep(seconds)
        finally:
            _signal_all(reversed(processes), signal.SIGCONT)  # an agent that goes on ends its worker
        return True

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        """The link to the folder points nowhere, as a mount that is gone."""
        target = str(self._disk.readlink())
        _relink(self._disk, f"{target}-gone")
        try:
            yield
        finally:
            _relink(self._disk, target)

    @contextlib.contextmanager
    def _full(self) -> Iterator[None]:
        """No process of a node can write to a file: emulates a full disk by a limit of the size of files."""
        processes = [p for agent in child_pids(self._fork_server.pid) for p in (agent, *child_pids(agent))]
        limits = {process: limit for process in processes if (limit := _set_file_size_limit(process, 0)) is not None}
        try:
            yield
        finally:
            for process, limit in limits.items():
                _set_file_size_limit(process, limit)


def _relink(link: Path, target: str) -> None:
    temporary = link.with_name(f"{link.name}.new")
    temporary.symlink_to(target)
    temporary.replace(link)


def _set_file_size_limit(process: int, limit: int) -> int | None:
    """Set the largest size of a file that a process can write; returns the limit before. None: it has ended."""
    try:
        soft, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
        resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, hard))
    except OSError:
        return None
    return soft


def _signal_all(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
