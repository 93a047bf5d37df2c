"""Reshaped epoch: the epoch in which the present workers continue as pipelines of other depths. Pure.

State is addressed by layer: whatever the old shape, a worker that holds a layer for the next step can send it to any
other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from culm.cluster.leader.next_epoch import NextEpoch, evaluation_plan_around
from culm.cluster.run_setup import RunSetup
from culm.errors import PlanError
from culm.plan.recover.lineage import WorkerInventory
from culm.plan.recover.recovery_plan import RecoveryPlan
from culm.plan.recover.role_assignment import (
    RoleAssignment,
    SurvivingCluster,
    assign_roles,
    shadows_on_other_nodes,
)
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.reshape.pipeline_shape import (
    Depths,
    PipelineShape,
    ShapeInputs,
    best_depths,
    build_shape,
    format_depths,
    slots_to_fill,
)
from culm.plan.reshape.slot_assignment import WorkerPlace, assign_slots, layer_transfers, layers_without_holder
from culm.runtime.epoch import Epoch, Member, Shadow
from culm.schedule import Costs, Plan


def layer_model_of(setup: RunSetup) -> ShapeInputs:
    """The inputs from which other shapes of the run are built."""
    return ShapeInputs(
        layers=setup.layers,
        micro_batches=Plan.from_text(setup.plan).micro_batches,
        schedule=setup.schedule,
        ranges=len(setup.segments) // setup.stages if setup.schedule == "interleaved" else 1,
        may_use_two_ranges=setup.schedule == PLANNED and len(setup.segments) > setup.stages,
        evaluation_micro_batches=setup.evaluation_parts if setup.evaluation is not None else 0,
        memory=setup.memory,
        max_activations=setup.max_activations,
        synchronous=setup.synchronous_step,
        splits_backward=setup.splits_backward,
        links=setup.links,
    )


def initial_shape(setup: RunSetup) -> PipelineShape:
    """The shape of a run as it was set up."""
    return PipelineShape(
        depths=(setup.stages,) * setup.pipelines,
        segments=setup.segments,
        plan_text=setup.plan,
        evaluation_plan_text=setup.evaluation,
        segment_costs=setup.costs,
        max_activations=setup.activations,
    )


def setup_with_shape(setup: RunSetup, shape: PipelineShape | None) -> RunSetup:
    """The setup with another shape, from which the leader makes epochs. None: the shape of the setup."""
    if shape is None:
        return setup
    plan = Plan.from_text(shape.plan_text)
    return msgspec.structs.replace(
        setup,
        pipelines=plan.pipelines,
        stages=plan.stages,
        segments=shape.segments,
        plan=shape.plan_text,
        evaluation=shape.evaluation_plan_text,
        costs=shape.segment_costs,
        activations=shape.max_activations,
    )


def layer_holders(inventories: Mapping[int, WorkerInventory], step: int) -> dict[int, set[int]]:
    """By layer: the workers that hold it for this step."""
    holders: dict[int, set[int]] = {}
    for worker, inventory in inventories.items():
        for layer in inventory.layers_by_step.get(step, ()):
            holders.setdefault(layer, set()).add(worker)
    return holders


def any_weights_after(inventories: Mapping[int, WorkerInventory], step: int) -> bool:
    """Whether a worker has weights for a later step: continuing from this one would discard them."""
    return any(version > step for inventory in inventories.values() for version in inventory.layers_by_step)


def count_discarded_actions(inventories: Mapping[int, WorkerInventory], step: int) -> int:
    """How many finished actions of this step and later ones are discarded, as far as survivors report."""
    return sum(
        (cell in each.tapes_after_forward)
        + 2 * (cell in each.tapes_after_input_grad)
        + 2 * (cell in each.accumulated_grads)
        for each in inventories.values()
        for cell in {*each.tapes_after_forward, *each.tapes_after_input_grad, *each.accumulated_grads}
        if cell.step >= step
    )


@dataclass(frozen=True, kw_only=True)
class ReshapeInputs:
    """The present workers and what they hold."""

    setup: RunSetup
    """The original setup of the run."""
    old_epoch: Epoch
    epoch_number: int
    leader: str
    workers: Mapping[int, Member]
    """All workers that could have a slot, by number."""
    inventories: Mapping[int, WorkerInventory]
    """By worker, for the members of the old epoch."""
    step: int
    """The first step in the new shape; all earlier steps are committed."""
    zones: Mapping[int, str] = field(default_factory=dict)
    """Zone by node."""

    @property
    def holders(self) -> dict[int, set[int]]:
        available = {worker: each for worker, each in self.inventories.items() if worker in self.workers}
        return layer_holders(available, self.step)

    @property
    def layers_without_holder(self) -> list[int]:
        """The layers that no worker holds for the step."""
        return [layer for layer in range(len(self.setup.layers)) if not self.holders.get(layer)]


def template_epoch(reshape_inputs: ReshapeInputs) -> NextEpoch:
    """The epoch in which the workers form the pipelines that are best for their number; the open step is run again.
    Raises PlanError if there are none."""
    depths = best_depths(layer_model_of(reshape_inputs.setup), len(reshape_inputs.workers))
    nodes = len({member.node for member in reshape_inputs.workers.values()})
    why = f"{format_depths(depths)} is built from the {nodes} present nodes; the open step is run again"
    return reshaped_epoch(reshape_inputs, depths, why)


def reshaped_epoch(
    reshape_inputs: ReshapeInputs, depths: Depths, why: str, shape: PipelineShape | None = None
) -> NextEpoch:
    """The epoch in which the workers form pipelines of these depths, with the given `shape` if it is known. Raises
    PlanError if that is impossible."""
    setup, holders = reshape_inputs.setup, reshape_inputs.holders
    shape = shape or build_shape(layer_model_of(setup), depths)
    plan = Plan.from_text(shape.plan_text)
    places = {
        worker: WorkerPlace(member.node, reshape_inputs.zones.get(member.node, ""))
        for worker, member in reshape_inputs.workers.items()
    }
    worker_by_slot = assign_slots(
        shape, setup.strategy_object, places, holders, [layer.resident_bytes or 1 for layer in setup.layers]
    )
    lost = layers_without_holder(range(len(setup.layers)), worker_by_slot, holders)
    if lost:
        raise PlanError(f"layer {lost[0]} has no holder in {format_depths(depths)}: choose a layout with more nodes")
    cluster = _surviving_cluster(
        reshape_inputs, shape, plan, {slot: places[worker] for slot, worker in worker_by_slot.items()}
    )
    layout = assign_roles(cluster)
    epoch = msgspec.structs.replace(
        reshape_inputs.old_epoch,
        number=reshape_inputs.epoch_number,
        leader=reshape_inputs.leader,
        members=tuple(
            reshape_inputs.workers[worker_by_slot[slot]] if slot in worker_by_slot else None
            for slot in range(len(plan.workers))
        ),
        segments=shape.segments,
        plan=shape.plan_text,
        evaluation_plan=evaluation_plan_around(shape.evaluation_plan_text, layout),
        start=reshape_inputs.step,
        committed_steps=reshape_inputs.step,
        resume_step=None,
        resume_from=None,
        shadows=_shadows(cluster, layout),
        dropped_micro_batches=(),
        leaving_slots=(),
        recovery=RecoveryPlan(redone_actions=count_discarded_actions(reshape_inputs.inventories, reshape_inputs.step)),
        shape=shape,
        shape_epoch=reshape_inputs.epoch_number,
        shape_start=reshape_inputs.step,
        layer_moves=layer_transfers(shape, worker_by_slot, holders),
        stop_before=None,
    )
    return NextEpoch(epoch, why, "peers")


def _surviving_cluster(
    reshape_inputs: ReshapeInputs, shape: PipelineShape, plan: Plan, place_by_slot: Mapping[int, WorkerPlace]
) -> SurvivingCluster:
    forward, inputs, weight = zip(*shape.segment_costs, strict=True)
    return SurvivingCluster(
        full_plan=plan,
        policy=reshape_inputs.setup.strategy_object,
        held_stages={slot: frozenset(plan.stages_of(slot)) for slot in slots_to_fill(plan)},
        costs=Costs(forward=forward, input=inputs, weight=weight),
        synchronous_step=reshape_inputs.setup.synchronous_step,
        memory=shape.max_activations,
        zones={slot: place.zone for slot, place in place_by_slot.items() if place.zone},
        nodes={slot: place.node for slot, place in place_by_slot.items()},
    )


def _shadows(cluster: SurvivingCluster, layout: RoleAssignment) -> tuple[Shadow, ...]:
    """The shadow replicas of the new shape: those of the policy, on other nodes than what they shadow, and, unless it
    shadows every stage, one for each stage with too few holders. They are copied while training continues."""
    policy, plan = cluster.policy, cluster.full_plan
    found = shadows_on_other_nodes(policy.initial_shadows(plan), plan, cluster.nodes, cluster.zones)
    if not policy.shadows_every_stage:
        kept = {(replica.slot, replica.stage) for replica in found}
        found += tuple(replica for replica in layout.shadows if (replica.slot, replica.stage) not in kept)
    return tuple(Shadow(replica.stage, replica.slot, replica.source, needs_copy=True) for replica in found)
