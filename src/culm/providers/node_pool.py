"""NodePool: the nodes of a run that one launcher provides."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from culm.cluster.store.node_numbers import allocate_node_numbers
from culm.errors import RunError
from culm.observe.writers.run_folder import saved_checkpoint_steps
from culm.providers.provider import EXIT_REJOIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.providers.provider import Provider
    from culm.providers.run_handle import RunHandle

_MAX_REJOINS = 20
"""How often nodes are replaced within `_REJOINS_S` after their worker ended: a worker that fails this often will fail
again."""
_REJOINS_S = 600.0


class NodePool:
    """Starts and stops nodes of a run, and replaces nodes that rejoin."""

    def __init__(self, run: RunHandle, provider: Provider) -> None:
        self._run, self._provider = run, provider
        self.running: set[int] = set()
        self._rejoins: deque[float] = deque(maxlen=_MAX_REJOINS)
        """Times of the last replacements."""
        self._zones: dict[int, str] = {}
        self._replaced_by: dict[int, int] = {}
        """New number of a node that rejoined, by its old number."""

    async def start(self, count: int = 1, zones: Sequence[str] = ()) -> range:
        """Start nodes with the next free numbers, in these zones. Returns the numbers; the nodes join by themselves."""
        numbers = await allocate_node_numbers(self._run.store, count)
        for node, zone in zip(numbers, zones or [""] * count, strict=True):
            self._provider.start(node, zone)
            self._zones[node] = zone
            self.running.add(node)
        return numbers

    def stop(self, node: int, notice_s: float = 0.0) -> None:
        """Stop a node, also if it has rejoined under another number."""
        while node in self._replaced_by:
            node = self._replaced_by[node]
        self._provider.stop(node, notice_s)

    def _may_rejoin(self) -> bool:
        """Whether another node may be replaced; counts the replacement."""
        now = asyncio.get_running_loop().time()
        if len(self._rejoins) == _MAX_REJOINS and now - self._rejoins[0] < _REJOINS_S:
            return False
        self._rejoins.append(now)
        return True

    async def watch(self) -> None:
        """Wait until every node has ended. A node whose machine is still there is replaced by a new one. The run fails
        when the last node has ended, or when a node fails before it has joined."""
        while self.running:
            try:
                node, status = await self._provider.wait_for_exit()
            except RunError as error:
                self._run.fail(str(error))
                return
            self.running.discard(node)
            zone = self._zones.pop(node, "")
            if status == EXIT_REJOIN and not self._run.has_ended and self._may_rejoin():
                (self._replaced_by[node],) = await self.start(zones=[zone])
            elif status < 0 and self._run.epoch is None and self._run.setup.survives_losses:
                # Killed before it joined, or while there was no leader. The start of the run waits for all nodes.
                await self._run.store.put(f"missing/{node}", b"")
            elif not self._run.has_joined(node) and node < self._run.setup.nodes:
                self._run.fail(f"node {node} ended with status {status} before it had joined")
            if not self.running and self._run.owns_all_nodes:
                self._run.fail(f"all nodes ended before the run did: {_saved_steps_words(self._run.setup.out)}")


def _saved_steps_words(out: str | None) -> str:
    steps = saved_checkpoint_steps(out) if out is not None else []
    if steps:
        return f"{steps[-1]} steps are saved, continue with --resume {out}"
    return "nothing of it was saved; --checkpoint-every N with --out saves every N steps"
