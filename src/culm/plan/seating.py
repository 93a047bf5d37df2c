"""Who sits where in another shape, and which layer goes from whom to whom. Pure.

seating     which node takes which post: few layers on their way, holders of a layer in different zones
moves       who gives which layers to whom
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

import msgspec

from culm.errors import PlanError
from culm.plan.layout import first_layout
from culm.plan.partition import count
from culm.plan.relayout import Shape, layers_of, posts, written
from culm.schedule import Plan

_ROUNDS = 8
"""How often all pairs of nodes are looked at for a better exchange of posts; two or three times are enough mostly."""


class Move(msgspec.Struct, frozen=True):
    """Layers go from one worker to another, with everything that belongs to them."""

    source: int
    """Its slot in the epoch in which they go."""
    target: int
    layers: tuple[int, ...]


def seating(
    shape: Shape,
    strategy: str,
    nodes: Mapping[int, str],
    holders: Mapping[int, Collection[int]],
    weights: Sequence[float],
) -> dict[int, int]:
    """By post: the node that takes it, of `nodes`, which have zones.

    First no layer shall have all its holders in one zone, then as few as can be in any; then as little as can be is on
    its way: `holders` are the nodes that have a layer, `weights` what each layer weighs. At the start nobody has any,
    and nodes take posts in the order of their numbers. Where there are more nodes than posts, whoever holds what nobody
    else does is taken first.
    """
    plan = Plan.from_text(shape.plan)
    places = posts(plan)
    if len(nodes) < len(places):
        raise PlanError(f"{written(shape.depths)} needs {count(len(places), 'node')}: {len(nodes)} are there")
    task = _Seating(shape, plan, strategy, nodes, holders, weights)
    return task.improved(task.first(places))


class _Seating:
    """An assignment that is made better by exchanges."""

    def __init__(
        self,
        shape: Shape,
        plan: Plan,
        strategy: str,
        nodes: Mapping[int, str],
        holders: Mapping[int, Collection[int]],
        weights: Sequence[float],
    ) -> None:
        self.nodes, self.holders, self.weights = nodes, holders, weights
        self.layers = {slot: layers_of(shape, plan, slot) for slot in posts(plan)}
        self.circles = _circles(plan, strategy)
        self.sole = {next(iter(held)) for held in holders.values() if len(held) == 1}
        self.zoned = len(set(nodes.values())) > 1
        self.near: defaultdict[int, list[int]] = defaultdict(list)
        for number, circle in enumerate(self.circles):
            for slot in circle:
                self.near[slot].append(number)

    def overlap(self, slot: int, node: int) -> float:
        """What need not be moved."""
        return sum(self.weights[layer] for layer in self.layers[slot] if node in self.holders.get(layer, ()))

    def first(self, places: Sequence[int]) -> dict[int, int]:
        """Whoever has most of a post's layers takes it, the largest share first; of equals in order of numbers."""
        free = self._chosen(len(places))
        pairs = [(-share, slot, node) for slot in places for node in free if (share := self.overlap(slot, node))]
        taken: dict[int, int] = {}
        for _, slot, node in sorted(pairs):
            if slot not in taken and node not in taken.values():
                taken[slot] = node
        left = [node for node in free if node not in taken.values()]
        for slot in places:
            if slot not in taken:
                taken[slot] = left.pop(0)
        return taken

    def _chosen(self, many: int) -> list[int]:
        """Of all nodes so many: first whoever has a layer that nobody else has, then who has most."""
        held = Counter(node for nodes in self.holders.values() for node in nodes)
        order = sorted(self.nodes, key=lambda node: (node not in self.sole, -held[node], node))
        return sorted(order[:many])

    def improved(self, taken: dict[int, int]) -> dict[int, int]:
        """Exchange nodes between two posts as long as zones are better spread, or less has to move, by that."""
        if not self.zoned:
            return taken
        spare = [node for node in sorted(self.nodes) if node not in taken.values()]
        for _ in range(_ROUNDS):
            better = [self._exchange(taken, one, other) for one, other in combinations(taken, 2)]
            better += [self._replace(taken, slot, spare) for slot in taken if spare]
            if not any(better):
                break
        return taken

    def _exchange(self, taken: dict[int, int], one: int, other: int) -> bool:
        if self.nodes[taken[one]] == self.nodes[taken[other]]:
            return False
        before = self._worth(taken, (one, other))
        taken[one], taken[other] = taken[other], taken[one]
        if self._worth(taken, (one, other)) < before:
            return True
        taken[one], taken[other] = taken[other], taken[one]
        return False

    def _replace(self, taken: dict[int, int], slot: int, spare: list[int]) -> bool:
        """Somebody that would be left over takes a post, unless whoever had it is indispensable."""
        for index, node in enumerate(spare):
            before, own = self._worth(taken, (slot,)), taken[slot]
            taken[slot] = node
            if own not in self.sole and self._worth(taken, (slot,)) < before:
                spare[index] = own
                return True
            taken[slot] = own
        return False

    def _worth(self, taken: Mapping[int, int], slots: Iterable[int]) -> tuple[int, int, float]:
        """(circles in one zone alone, pairs of holders in one zone, what has to move) around some posts."""
        alone = pairs = 0
        for number in {number for slot in slots for number in self.near[slot]}:
            circle = self.circles[number]
            zones = Counter(self.nodes[taken[slot]] for slot in circle)
            alone += len(circle) > 1 and len(zones) == 1
            pairs += sum(math.comb(many, 2) for many in zones.values())
        return alone, pairs, -sum(self.overlap(slot, taken[slot]) for slot in slots)


def _circles(plan: Plan, strategy: str) -> list[tuple[int, ...]]:
    """By stage: the posts that hold it, shadows included."""
    shadows = first_layout(plan, strategy)
    return [
        tuple(sorted({*plan.holders_of(stage), *(r.slot for r in shadows if r.stage == stage)}))
        for stage in range(plan.stages)
    ]


def moves(shape: Shape, seats: Mapping[int, int], holders: Mapping[int, Collection[int]]) -> tuple[Move, ...]:
    """Who gives which layers to whom, by slot of the new shape: every worker what it lacks, from whoever has given
    least so far. Every layer has a holder with a seat."""
    plan = Plan.from_text(shape.plan)
    slot_of = {node: slot for slot, node in seats.items()}
    given: Counter[int] = Counter()
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for target, node in sorted(seats.items()):
        for layer in layers_of(shape, plan, target):
            if node in holders[layer]:
                continue
            source = min((slot_of[other] for other in holders[layer] if other in slot_of), key=lambda s: (given[s], s))
            given[source] += 1
            found[source, target].append(layer)
    return tuple(Move(source, target, tuple(layers)) for (source, target), layers in sorted(found.items()))


def unseated(layers: Iterable[int], seats: Mapping[int, int], holders: Mapping[int, Collection[int]]) -> list[int]:
    """The layers that nobody with a seat holds."""
    seated = set(seats.values())
    return [layer for layer in layers if seated.isdisjoint(holders.get(layer, ()))]
