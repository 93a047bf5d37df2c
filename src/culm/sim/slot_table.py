"""Which node fills which slot, which slots are empty, and which nodes stand by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from culm.plan import Slot

if TYPE_CHECKING:
    from culm.sim.engine import SimulatedNode


class SlotTable:
    """D pipelines of P stages and their nodes. `spread_zones` puts neighbours of a pipeline into different zones.

    Otherwise a pipeline is filled from one zone as far as possible, so that the loss of a zone takes one pipeline and
    not all holders of a stage.
    """

    def __init__(self, stages: int, max_pipelines: int, *, spread_zones: bool = False) -> None:
        self.stages = stages
        self.max_pipelines = max_pipelines
        self.spread_zones = spread_zones
        self.pipelines = 0
        self.nodes: dict[Slot, SimulatedNode] = {}
        self.slot_of: dict[str, Slot] = {}
        self.holes: set[Slot] = set()
        self.standby: dict[str, SimulatedNode] = {}

    @property
    def members(self) -> int:
        return len(self.nodes) + len(self.standby)

    @property
    def fillable_pipelines(self) -> int:
        """Number of pipelines that all members together could fill."""
        return min(self.max_pipelines, self.members // self.stages)

    def remove(self, nodes: Iterable[SimulatedNode]) -> list[Slot]:
        """Remove nodes; returns the slots that became empty."""
        emptied = []
        for node in nodes:
            self.standby.pop(node.name, None)
            slot = self.slot_of.pop(node.name, None)
            if slot is not None:
                del self.nodes[slot]
                emptied.append(slot)
        self.holes.update(emptied)
        return emptied

    def add(self, nodes: Iterable[SimulatedNode]) -> None:
        self.standby.update((node.name, node) for node in nodes)

    def rebuild_pipelines(self, pipelines: int | None = None) -> None:
        """All members in as many whole pipelines as possible (or as requested); the others stand by."""
        members = [*self.nodes.values(), *self.standby.values()]
        self.pipelines = self.fillable_pipelines if pipelines is None else pipelines
        self.nodes, self.slot_of, self.holes = {}, {}, set()
        order = iter(interleave_zones(members) if self.spread_zones else sort_by_zone(members))
        for slot in self.slots_of_pipelines(self.pipelines):
            self._assign(slot, next(order))
        self.standby = {node.name: node for node in order}

    def slots_of_pipelines(self, pipelines: int) -> Iterator[Slot]:
        return (Slot(d, s) for d in range(pipelines) for s in range(self.stages))

    def add_pipelines(self) -> int:
        """Build further pipelines from standby nodes; returns how many."""
        added = min(self.max_pipelines - self.pipelines, len(self.standby) // self.stages)
        for pipeline in range(self.pipelines, self.pipelines + added):
            for stage in range(self.stages):
                self._assign(Slot(pipeline, stage), self.standby.pop(next(iter(self.standby))))
        self.pipelines += added
        return added

    def _assign(self, slot: Slot, node: SimulatedNode) -> None:
        self.nodes[slot] = node
        self.slot_of[node.name] = slot


def sort_by_zone(nodes: Iterable[SimulatedNode]) -> list[SimulatedNode]:
    return sorted(nodes, key=lambda node: node.zone)


def interleave_zones(nodes: Iterable[SimulatedNode]) -> list[SimulatedNode]:
    """The nodes of all zones in turn."""
    count_by_zone: Counter[str] = Counter()
    keyed = []
    for node in nodes:
        keyed.append((count_by_zone[node.zone], node.zone, node))
        count_by_zone[node.zone] += 1
    return [node for _, _, node in sorted(keyed, key=lambda key: key[:2])]
