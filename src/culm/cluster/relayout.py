"""From one shape to another: the epoch in which the same nodes, and new ones, go on as other pipelines. Pure.

State is addressed by layer: whatever the shape was, who has a layer as it is for the next step can give it to anyone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from culm.cluster.regroup import Regrouped, evaluation_around
from culm.cluster.setup import Setup
from culm.errors import PlanError
from culm.plan.layout import SHADOWING, Layout, World, arrange_around, first_layout
from culm.plan.lineage import Standing
from culm.plan.recover import Recovery
from culm.plan.relayout import Depths, Model, Shape, posts, shape_of, written
from culm.plan.seating import moves, seating, unseated
from culm.runtime.epoch import Epoch, Member, Shadow
from culm.schedule import Costs, Plan


def model_of(setup: Setup) -> Model:
    """What other shapes of the run can be cut out of."""
    return Model(
        layers=setup.layers,
        micro_batches=Plan.from_text(setup.plan).micro_batches,
        schedule=setup.schedule,
        ranges=len(setup.segments) // setup.stages if setup.schedule == "interleaved" else 1,
        evaluation_parts=setup.evaluation_parts if setup.evaluation is not None else 0,
        memory=setup.memory,
    )


def shape_now(setup: Setup) -> Shape:
    """The shape of a run that is still as it was set up."""
    return Shape(
        depths=(setup.stages,) * setup.pipelines,
        segments=setup.segments,
        plan=setup.plan,
        evaluation=setup.evaluation,
        costs=setup.costs,
        activations=setup.activations,
    )


def reshaped(setup: Setup, shape: Shape | None) -> Setup:
    """What the leader makes epochs out of once the shape is another one. None: it is as it was set up."""
    if shape is None:
        return setup
    plan = Plan.from_text(shape.plan)
    return msgspec.structs.replace(
        setup,
        pipelines=plan.pipelines,
        stages=plan.stages,
        segments=shape.segments,
        plan=shape.plan,
        evaluation=shape.evaluation,
        costs=shape.costs,
        activations=shape.activations,
    )


def holders_of(standings: Mapping[int, Standing], step: int) -> dict[int, set[int]]:
    """By layer: the nodes that have it as it is for a step."""
    found: dict[int, set[int]] = {}
    for node, standing in standings.items():
        for layer in standing.layers.get(step, ()):
            found.setdefault(layer, set()).add(node)
    return found


def ahead_of(standings: Mapping[int, Standing], step: int) -> bool:
    """Whether anybody has weights for a later step: going on from this one would throw that away."""
    return any(version > step for standing in standings.values() for version in standing.layers)


def given_up(standings: Mapping[int, Standing], step: int) -> int:
    """How many finished actions of steps from this one on are thrown away, as far as survivors saw."""
    return sum(
        (cell in each.forwards) + 2 * (cell in each.halves) + 2 * (cell in each.summed)
        for each in standings.values()
        for cell in {*each.forwards, *each.halves, *each.summed}
        if cell.step >= step
    )


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Who is there, and what they have."""

    setup: Setup
    """As the run was set up."""
    old: Epoch
    number: int
    leader: str
    nodes: Mapping[int, Member]
    """Everybody that could take part."""
    standings: Mapping[int, Standing]
    """By node, of those that trained until now."""
    step: int
    """The first one of the new shape: all before are committed."""
    zones: Mapping[int, str] = field(default_factory=dict)
    """By node."""

    @property
    def holders(self) -> dict[int, set[int]]:
        there = {node: each for node, each in self.standings.items() if node in self.nodes}
        return holders_of(there, self.step)

    @property
    def homeless(self) -> list[int]:
        """The layers that nobody has as they are for the step."""
        return [layer for layer in range(len(self.setup.layers)) if not self.holders.get(layer)]


def relayout(scene: Scene, depths: Depths, why: str) -> Regrouped:
    """The epoch in which the nodes are pipelines of these depths. Raises PlanError where that can not be."""
    setup, holders = scene.setup, scene.holders
    shape = shape_of(model_of(setup), depths)
    plan = Plan.from_text(shape.plan)
    zones = {node: scene.zones.get(node, "") for node in scene.nodes}
    seats = seating(shape, setup.strategy, zones, holders, [layer.resident_bytes or 1 for layer in setup.layers])
    lost = unseated(range(len(setup.layers)), seats, holders)
    if lost:
        raise PlanError(f"layer {lost[0]} has no holder in {written(depths)}: make room for more nodes")
    layout = arrange_around(_world(scene, shape, plan, seats))
    epoch = msgspec.structs.replace(
        scene.old,
        number=scene.number,
        leader=scene.leader,
        members=tuple(scene.nodes[seats[slot]] if slot in seats else None for slot in range(len(plan.workers))),
        segments=shape.segments,
        plan=shape.plan,
        evaluation=evaluation_around(shape.evaluation, layout),
        start=scene.step,
        committed=scene.step,
        reset=False,
        resume=None,
        resume_from=None,
        shadows=_shadows(setup.strategy, plan, layout),
        dropped=(),
        leaving=(),
        recovery=Recovery(redone=given_up(scene.standings, scene.step)),
        shape=shape,
        shaped=scene.number,
        moves=moves(shape, seats, holders),
        until=None,
    )
    return Regrouped(epoch, layout, why, "peers")


def _world(scene: Scene, shape: Shape, plan: Plan, seats: Mapping[int, int]) -> World:
    forward, inputs, weight = zip(*shape.costs, strict=True)
    return World(
        plan=plan,
        strategy=scene.setup.strategy,
        held={slot: frozenset(plan.stages_of(slot)) for slot in posts(plan)},
        costs=Costs(forward=forward, input=inputs, weight=weight),
        joint=scene.setup.joint,
        memory=shape.activations,
        zones={slot: scene.zones[node] for slot, node in seats.items() if scene.zones.get(node)},
    )


def _shadows(strategy: str, plan: Plan, layout: Layout) -> tuple[Shadow, ...]:
    """Copies beside the new shape: those of the strategy, or where a layer would have one holder. They are made while
    training goes on."""
    found = first_layout(plan, strategy) if strategy in SHADOWING else layout.replicas
    return tuple(Shadow(replica.stage, replica.slot, replica.source, fresh=True) for replica in found)
