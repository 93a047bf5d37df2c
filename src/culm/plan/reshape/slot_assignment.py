"""Assignment of workers to the slots of a shape, and the layer transfers it needs. Pure.

assign_slots      which worker takes which slot: few layers to move, holders of a layer on different nodes and zones
layer_transfers   which layers are sent from which slot to which
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import msgspec

from culm.errors import PlanError
from culm.plan.recover.role_assignment import RecoveryPolicy
from culm.plan.reshape.pipeline_shape import PipelineShape, format_depths, layers_of_slot, slots_to_fill
from culm.schedule import Plan
from culm.text_format import count_noun

_MAX_ROUNDS = 8
"""How often all pairs of workers are checked for a better exchange of slots; mostly two or three times are enough."""


class LayerTransfer(msgspec.Struct, frozen=True):
    """Layers are sent from one worker to another, with their optimizer state."""

    source: int
    """Its slot in the epoch in which the layers are sent."""
    target: int
    layers: tuple[int, ...]


class WorkerPlace(NamedTuple):
    """What a worker is lost together with."""

    node: int
    zone: str = ""


def assign_slots(
    shape: PipelineShape,
    policy: RecoveryPolicy,
    places: Mapping[int, WorkerPlace],
    holders: Mapping[int, Collection[int]],
    layer_bytes: Sequence[float],
) -> dict[int, int]:
    """Assign a worker to every slot; `places` has all available workers.

    Goals, in this order: no layer has all of its holders on one node, or else in one zone; as few pairs of holders as
    possible share a node, or else a zone; neighbouring stages share a node; as few bytes as possible have to move.
    `holders` are the workers that have a layer, `layer_bytes` the size of each layer. At the start no worker has any
    layer, and workers take slots in the order of their numbers: a pipeline runs through the workers of a node first. If
    there are more workers than slots, workers that are the only holder of a layer are taken first.
    """
    plan = Plan.from_text(shape.plan_text)
    slots = slots_to_fill(plan)
    if len(places) < len(slots):
        raise PlanError(
            f"{format_depths(shape.depths)} needs {count_noun(len(slots), 'worker')}, but there are {len(places)}"
        )
    assigner = _SlotAssigner(shape, plan, policy, places, holders, layer_bytes)
    return assigner.improve(assigner.initial_assignment(slots))


class _SlotAssigner:
    """An assignment that is improved by exchanges."""

    def __init__(
        self,
        shape: PipelineShape,
        plan: Plan,
        policy: RecoveryPolicy,
        places: Mapping[int, WorkerPlace],
        holders: Mapping[int, Collection[int]],
        layer_bytes: Sequence[float],
    ) -> None:
        self.places, self.holders, self.layer_bytes = places, holders, layer_bytes
        self.layers_by_slot = {slot: layers_of_slot(shape, plan, slot) for slot in slots_to_fill(plan)}
        shared_nodes = len({place.node for place in places.values()}) < len(places)
        self.holder_groups = _holder_groups(plan, policy, with_shadows=not shared_nodes)
        self.neighbours = _neighbours(plan) if shared_nodes else {}
        self.sole_holders = {next(iter(held)) for held in holders.values() if len(held) == 1}
        self.can_improve = shared_nodes or len({place.zone for place in places.values()}) > 1
        self.groups_by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for number, group in enumerate(self.holder_groups):
            for slot in group:
                self.groups_by_slot[slot].append(number)

    def held_bytes(self, slot: int, worker: int) -> float:
        """Bytes of the slot's layers that the worker has already."""
        return sum(
            self.layer_bytes[layer] for layer in self.layers_by_slot[slot] if worker in self.holders.get(layer, ())
        )

    def initial_assignment(self, slots: Sequence[int]) -> dict[int, int]:
        """Each slot goes to the worker with most of its layers, the largest share first; ties in order of numbers."""
        free = self._select_workers(len(slots))
        pairs = [
            (-share, slot, worker) for slot in slots for worker in free if (share := self.held_bytes(slot, worker))
        ]
        assignment: dict[int, int] = {}
        for _, slot, worker in sorted(pairs):
            if slot not in assignment and worker not in assignment.values():
                assignment[slot] = worker
        left = [worker for worker in free if worker not in assignment.values()]
        for slot in slots:
            if slot not in assignment:
                assignment[slot] = left.pop(0)
        return assignment

    def _select_workers(self, count: int) -> list[int]:
        """Select `count` workers: first the only holders of a layer, then those with the most layers."""
        held = Counter(worker for workers in self.holders.values() for worker in workers)
        order = sorted(self.places, key=lambda worker: (worker not in self.sole_holders, -held[worker], worker))
        return sorted(order[:count])

    def improve(self, assignment: dict[int, int]) -> dict[int, int]:
        """Exchange workers between two slots as long as this spreads holders better or moves fewer bytes."""
        if not self.can_improve:
            return assignment
        spare = [worker for worker in sorted(self.places) if worker not in assignment.values()]
        for _ in range(_MAX_ROUNDS):
            better = [self._try_exchange(assignment, one, other) for one, other in combinations(assignment, 2)]
            better += [self._try_spare(assignment, slot, spare) for slot in assignment if spare]
            if not any(better):
                break
        return assignment

    def _try_exchange(self, assignment: dict[int, int], one: int, other: int) -> bool:
        if self._are_alike(assignment[one], assignment[other]):
            return False
        before = self._cost(assignment, (one, other))
        assignment[one], assignment[other] = assignment[other], assignment[one]
        if self._cost(assignment, (one, other)) < before:
            return True
        assignment[one], assignment[other] = assignment[other], assignment[one]
        return False

    def _are_alike(self, one: int, other: int) -> bool:
        """Whether exchanging two workers would change neither nodes nor zones of any holder."""
        if self.neighbours:
            return self.places[one].node == self.places[other].node
        return self.places[one].zone == self.places[other].zone

    def _try_spare(self, assignment: dict[int, int], slot: int, spare: list[int]) -> bool:
        """Give the slot to a spare worker if that is better, unless its worker is the only holder of a layer."""
        for index, worker in enumerate(spare):
            before, own = self._cost(assignment, (slot,)), assignment[slot]
            assignment[slot] = worker
            if own not in self.sole_holders and self._cost(assignment, (slot,)) < before:
                spare[index] = own
                return True
            assignment[slot] = own
        return False

    def _cost(self, assignment: Mapping[int, int], slots: Collection[int]) -> tuple[float, ...]:
        """What a better assignment has less of, around some slots: groups of holders on one node, groups in one zone,
        pairs of holders on the same node, pairs in the same zone, neighbouring stages on different nodes, bytes that
        are not in place."""
        groups = {number for slot in slots for number in self.groups_by_slot[slot]}
        held = [[self.places[assignment[slot]] for slot in self.holder_groups[number]] for number in groups]
        nodes = [Counter(place.node for place in group) for group in held]
        zones = [Counter(place.zone for place in group) for group in held]
        apart = {
            frozenset((slot, other))
            for slot in slots
            for other in self.neighbours.get(slot, ())
            if self.places[assignment[slot]].node != self.places[assignment[other]].node
        }
        return (
            _single(nodes),
            _single(zones),
            _pairs(nodes),
            _pairs(zones),
            len(apart),
            -sum(self.held_bytes(slot, assignment[slot]) for slot in slots),
        )


def _single(groups: Iterable[Counter[Any]]) -> int:
    """The number of groups of several holders that are all in one place."""
    return sum(len(places) == 1 < places.total() for places in groups)


def _pairs(groups: Iterable[Counter[Any]]) -> int:
    """The number of pairs of holders in the same place."""
    return sum(math.comb(many, 2) for places in groups for many in places.values())


def _neighbours(plan: Plan) -> dict[int, tuple[int, ...]]:
    """By slot: the filled slots before and after it in its pipeline."""
    slots = slots_to_fill(plan)
    chains = [[slot for slot in slots if slot // plan.stages == d] for d in range(plan.pipelines)]
    pairs = [pair for chain in chains for pair in pairwise(chain)]
    return {slot: tuple(other for pair in pairs if slot in pair for other in pair if other != slot) for slot in slots}


def _holder_groups(plan: Plan, policy: RecoveryPolicy, *, with_shadows: bool) -> list[tuple[int, ...]]:
    """By stage: the slots that hold it. Where nodes have several workers, shadows are placed after the slots."""
    shadows = policy.initial_shadows(plan) if with_shadows else ()
    return [
        tuple(sorted({*plan.holders_of(stage), *(r.slot for r in shadows if r.stage == stage)}))
        for stage in range(plan.stages)
    ]


def layer_transfers(
    shape: PipelineShape, assignment: Mapping[int, int], holders: Mapping[int, Collection[int]]
) -> tuple[LayerTransfer, ...]:
    """The transfers that give every worker the layers it lacks, by slot of the new shape. Each layer comes from the
    holder that sends the least so far. Every layer must have a holder in the assignment."""
    plan = Plan.from_text(shape.plan_text)
    slot_of = {worker: slot for slot, worker in assignment.items()}
    layers_sent: Counter[int] = Counter()
    layers_by_pair: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for target, worker in sorted(assignment.items()):
        for layer in layers_of_slot(shape, plan, target):
            if worker in holders[layer]:
                continue
            source = min(
                (slot_of[other] for other in holders[layer] if other in slot_of), key=lambda s: (layers_sent[s], s)
            )
            layers_sent[source] += 1
            layers_by_pair[source, target].append(layer)
    return tuple(
        LayerTransfer(source, target, tuple(layers)) for (source, target), layers in sorted(layers_by_pair.items())
    )


def layers_without_holder(
    layers: Iterable[int], assignment: Mapping[int, int], holders: Mapping[int, Collection[int]]
) -> list[int]:
    """The layers that no assigned worker holds."""
    assigned = set(assignment.values())
    return [layer for layer in layers if assigned.isdisjoint(holders.get(layer, ()))]
