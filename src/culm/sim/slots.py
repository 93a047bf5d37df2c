"""Who fills which slot, where the holes are, and who stands by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from culm.plan import Slot

if TYPE_CHECKING:
    from culm.plan.normalize import Spread
    from culm.sim.engine import Node


class Slots:
    """D pipelines of P stages, with nodes in them. `apart` puts neighbours of a pipeline into different zones.

    Otherwise a pipeline is filled out of one zone as far as possible, so that a zone that is lost takes one pipeline
    and not all holders of a stage.
    """

    def __init__(self, stages: int, most: int, *, apart: bool = False) -> None:
        self.stages = stages
        self.most = most
        self.apart = apart
        self.pipelines = 0
        self.nodes: dict[Slot, Node] = {}
        self.place: dict[str, Slot] = {}
        self.holes: set[Slot] = set()
        self.standby: dict[str, Node] = {}

    @property
    def members(self) -> int:
        return len(self.nodes) + len(self.standby)

    @property
    def whole(self) -> int:
        """Pipelines that all members together could fill."""
        return min(self.most, self.members // self.stages)

    def remove(self, gone: Iterable[Node]) -> list[Slot]:
        """Take nodes out; the slots that they have left empty."""
        hit = []
        for node in gone:
            self.standby.pop(node.name, None)
            slot = self.place.pop(node.name, None)
            if slot is not None:
                del self.nodes[slot]
                hit.append(slot)
        self.holes.update(hit)
        return hit

    def add(self, new: Iterable[Node]) -> None:
        self.standby.update((node.name, node) for node in new)

    def reform(self, pipelines: int | None = None) -> None:
        """All members in as many whole pipelines as can be (or as asked for), the others standing by."""
        everyone = [*self.nodes.values(), *self.standby.values()]
        self.pipelines = self.whole if pipelines is None else pipelines
        self.nodes, self.place, self.holes = {}, {}, set()
        order = iter(interleaved(everyone) if self.apart else by_zone(everyone))
        for slot in self.grid(self.pipelines):
            self._put(slot, next(order))
        self.standby = {node.name: node for node in order}

    def grid(self, pipelines: int) -> Iterator[Slot]:
        return (Slot(d, s) for d in range(pipelines) for s in range(self.stages))

    def fill(self) -> int:
        """Put those that stand by into holes, the stage that has lost most first; how many were filled."""
        filled = 0
        while self.holes and self.standby:
            lost = Counter(slot.stage for slot in self.holes)
            hole = max(self.holes, key=lambda slot: (lost[slot.stage], -slot.pipeline, -slot.stage))
            self.holes.discard(hole)
            self._put(hole, self.standby.pop(next(iter(self.standby))))
            filled += 1
        return filled

    def extend(self) -> int:
        """Further pipelines out of those that stand by; how many."""
        added = min(self.most - self.pipelines, len(self.standby) // self.stages)
        for pipeline in range(self.pipelines, self.pipelines + added):
            for stage in range(self.stages):
                self._put(Slot(pipeline, stage), self.standby.pop(next(iter(self.standby))))
        self.pipelines += added
        return added

    def spread(self) -> Spread:
        """How many workers each stage has lost."""
        lost = Counter(slot.stage for slot in self.holes)
        return tuple(lost[stage] for stage in range(self.stages))

    def move(self, wanted: Spread) -> int:
        """Nodes change stage until each has lost as many as wanted; how many moved."""
        moved, lost = 0, list(self.spread())
        givers = [stage for stage in range(self.stages) for _ in range(max(0, wanted[stage] - lost[stage]))]
        takers = [stage for stage in range(self.stages) for _ in range(max(0, lost[stage] - wanted[stage]))]
        for giver, taker in zip(givers, takers, strict=True):
            source = max(slot for slot in self.nodes if slot.stage == giver)
            target = min(slot for slot in self.holes if slot.stage == taker)
            node = self.nodes.pop(source)
            self.holes.add(source)
            self.holes.discard(target)
            self._put(target, node)
            moved += 1
        return moved

    def _put(self, slot: Slot, node: Node) -> None:
        self.nodes[slot] = node
        self.place[node.name] = slot


def by_zone(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.zone)


def interleaved(nodes: Iterable[Node]) -> list[Node]:
    """Zones in turn."""
    turns: Counter[str] = Counter()
    keyed = []
    for node in nodes:
        keyed.append((turns[node.zone], node.zone, node))
        turns[node.zone] += 1
    return [node for _, _, node in sorted(keyed, key=lambda key: key[:2])]
