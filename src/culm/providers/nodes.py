"""The nodes of a run that one launcher provides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.cluster.members import take_numbers
from culm.errors import RunError
from culm.observe.folder import saved
from culm.providers.base import REJOIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.providers.base import Provider
    from culm.providers.run import LocalRun

_RETURNS = 20
"""How often nodes come back by themselves: a worker that ends again and again has a reason that stays."""


class Nodes:
    """The nodes of a run that somebody provides: who is there, and what is done when one has ended."""

    def __init__(self, run: LocalRun, provider: Provider) -> None:
        self._run, self._provider = run, provider
        self.there: set[int] = set()
        self._returns = 0
        self._zones: dict[int, str] = {}
        self._became: dict[int, int] = {}
        """A node that came back by itself, and the number that it has now."""

    async def start(self, count: int = 1, zones: Sequence[str] = ()) -> range:
        """Bring up nodes with the next numbers, each in its zone where there are any; they join by themselves."""
        numbers = await take_numbers(self._run.store, count)
        for node, zone in zip(numbers, zones or [""] * count, strict=True):
            self._provider.start(node, zone)
            self._zones[node] = zone
            self.there.add(node)
        return numbers

    def stop(self, node: int, notice_s: float = 0.0) -> None:
        """Take the machine of a node away, whatever number it has by now."""
        while node in self._became:
            node = self._became[node]
        self._provider.stop(node, notice_s)

    async def watch(self) -> None:
        """Until every node has ended. One whose machine is still there comes back as a new one. The run ends with the
        last node, and with one that fails before it has joined."""
        while self.there:
            try:
                node, status = await self._provider.gone()
            except RunError as error:
                self._run.fail(str(error))
                return
            self.there.discard(node)
            zone = self._zones.pop(node, "")
            if status == REJOIN and not self._run.ended and self._returns < _RETURNS:
                self._returns += 1
                (self._became[node],) = await self.start(zones=[zone])
            elif status < 0 and self._run.epoch is None and self._run.setup.survives:
                # Killed: before it had joined, or when nobody led who would have known it. The start waits for all.
                await self._run.store.put(f"missing/{node}", b"")
            elif not self._run.joined(node) and node < self._run.setup.nodes:
                self._run.fail(f"node {node} ended with status {status} before it had joined")
            if not self.there and self._run.alone:
                self._run.fail(f"all nodes have ended before the run: {_what_is_left(self._run.setup.out)}")


def _what_is_left(out: str | None) -> str:
    steps = saved(out) if out is not None else []
    if steps:
        return f"{steps[-1]} steps are saved, continue with --resume {out}"
    return "nothing of it was saved; --checkpoint-every N with --out saves every N steps"
