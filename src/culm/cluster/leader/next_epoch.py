"""Next epoch: from the inventories of the survivors to the epoch they continue in. Pure: no clock, no store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from culm.cluster.run_setup import RunSetup
from culm.plan.recover.lineage import WorkerInventory
from culm.plan.recover.place_work import RunnerPool, place_items, whole_step_items
from culm.plan.recover.recovery_plan import RecoveryPlan, RecoveryProblem, plan_recovery
from culm.plan.recover.role_assignment import (
    RecoveryPolicy,
    RoleAssignment,
    SurvivingCluster,
    assign_roles,
    shadows_on_other_nodes,
    stages_without_holder,
    vacant_slots,
)
from culm.plan.replan.plan_cache import PlanCache
from culm.runtime.epoch import Epoch, Member, Shadow
from culm.schedule import UNIT_COSTS, Costs, Kind, Plan
from culm.schedule.plan_timing import time_plan

NO_MEMBERS: Mapping[int, Member] = {}
NO_ZONES: Mapping[int, str] = {}
"""Zones by node; a node without one is not listed."""
NO_SLOW_SLOTS: Mapping[int, float] = {}
_SOURCE_SENTENCES = {
    "peers": "peers run its micro-batches",
    "shadow": "the holder of a copy of its layers takes over",
    "drop": "its pipeline pauses and its samples are dropped until it is complete again, which changes training",
}


@dataclass(frozen=True)
class NextEpoch:
    """The next epoch and the reason for it."""

    epoch: Epoch
    why: str
    source: str
    """Where the lost layers come from: peers, shadow or checkpoint."""


def first_shadows(
    setup: RunSetup, members: Sequence[Member | None], zones: Mapping[int, str] = NO_ZONES
) -> tuple[Shadow, ...]:
    """The shadow replicas that the strategy keeps from the first step on, each on another node than the stage that it
    shadows; each worker builds its own."""
    plan = Plan.from_text(setup.plan)
    replicas = setup.strategy_object.initial_shadows(plan)
    placed = shadows_on_other_nodes(replicas, plan, nodes_by_slot(members), _zones_by_slot(members, zones))
    return tuple(Shadow(r.stage, r.slot, r.source) for r in placed)


def nodes_by_slot(members: Sequence[Member | None]) -> dict[int, int]:
    """The node of every filled slot."""
    return {slot: member.node for slot, member in enumerate(members) if member is not None}


def first_epoch(
    setup: RunSetup,
    leader: str,
    members: tuple[Member | None, ...],
    storage: str | None,
    beat_s: float,
    zones: Mapping[int, str] = NO_ZONES,
) -> Epoch:
    """The first epoch of a run, with every slot as set up."""
    return Epoch(
        number=1,
        leader=leader,
        members=members,
        segments=setup.segments,
        plan=setup.plan,
        evaluation_plan=setup.evaluation,
        start=setup.start,
        end_step=setup.steps,
        weighted_loss=setup.weighted,
        checkpoint_every=setup.checkpoint_every,
        storage=storage,
        resume_step=setup.resume,
        resume_from=setup.resume_from,
        reduces_on_devices=setup.reduce == "nccl",
        keeps_outputs=setup.keeps_action_outputs,
        shadows=first_shadows(setup, members, zones),
        eager_shadows=setup.eager_shadows,
        heartbeat_s=beat_s if setup.survives_losses else 0.0,
        committed_steps=setup.start,
        layer_inputs=setup.layer_inputs,
    )


def stages_lost(setup: RunSetup, inventories: Mapping[int, WorkerInventory], committed: int) -> list[int]:
    """The stages of which no survivor has a current copy: only a checkpoint can restore them."""
    return stages_without_holder(surviving_cluster(setup, inventories, committed, None, None))


def restart_epoch(
    setup: RunSetup,
    old: Epoch,
    number: int,
    leader: str,
    remaining_slots: Collection[int],
    step: int,
    checkpoint_folder: str | None,
    arrivals: Mapping[int, Member] = NO_MEMBERS,
) -> NextEpoch:
    """The epoch in which the workers of the remaining slots, and arriving nodes, rebuild everything from a checkpoint
    or, without a folder, from the start of the run. A stage without a worker goes to the slot with the fewest
    stages."""
    full = Plan.from_text(setup.plan)
    remaining_slots = {*remaining_slots, *arrivals}
    members = _next_members(old, remaining_slots, arrivals)
    held = {slot: set(full.stages_of(slot)) for slot in remaining_slots}
    for shadow in first_shadows(setup, members):
        if shadow.slot in held:
            held[shadow.slot].add(shadow.stage)
    for stage in range(full.stages):
        if not any(stage in stages for stages in held.values()):
            held[min(held, key=lambda slot: (len(held[slot]), slot))].add(stage)
    cluster = SurvivingCluster(
        full_plan=full,
        policy=setup.strategy_object,
        held_stages={slot: frozenset(stages) for slot, stages in held.items()},
        costs=_costs(setup),
        synchronous_step=setup.synchronous_step,
        memory=setup.activations,
        nodes=nodes_by_slot(members),
    )
    layout = assign_roles(cluster)
    epoch = msgspec.structs.replace(
        old,
        number=number,
        leader=leader,
        members=members,
        plan=layout.plan.to_text(),
        evaluation_plan=evaluation_plan_around(setup.evaluation, layout),
        start=step,
        committed_steps=step,
        rebuild_epoch=number,
        resume_step=None if checkpoint_folder is None else step,
        resume_from=checkpoint_folder,
        shadows=tuple(Shadow(r.stage, r.slot, r.source) for r in layout.shadows if not r.needs_copy),
        dropped_micro_batches=layout.dropped_micros,
        leaving_slots=(),
        recovery=RecoveryPlan(),
        layer_moves=(),
        stop_before=None,
    )
    why = f"some layers have no holder left: all nodes restart {start_phrase(step, checkpoint_folder)}"
    return NextEpoch(epoch, why, "checkpoint")


def start_phrase(step: int, checkpoint_folder: str | None) -> str:
    """Where a restart starts, as a phrase."""
    return "from the start of the run" if checkpoint_folder is None else f"from the checkpoint after step {step}"


def recovery_epoch(
    setup: RunSetup,
    old: Epoch,
    number: int,
    leader: str,
    inventories: Mapping[int, WorkerInventory],
    committed: int,
    *,
    plans: PlanCache | None = None,
    moving_slots: Collection[int] = (),
    arrivals: Mapping[int, Member] = NO_MEMBERS,
    leaving_slots: Collection[int] = (),
    zones: Mapping[int, str] = NO_ZONES,
    departure_steps: float = math.inf,
    slow_slots: Mapping[int, float] = NO_SLOW_SLOTS,
    slow_reason: str = "",
    limits_activations: bool = False,
    failed_slots: Collection[int] = (),
) -> NextEpoch:
    """The epoch in which the survivors, by slot, complete the open steps and then continue. Every stage has a holder.

    Workers in `moving_slots` hold a copy of another stage. They complete the open steps on their own stage and then
    move to the other one, unless their own stage would have too few holders. Each of the `arrivals` gets a copy of a
    stage that lacks a worker and runs it when it has caught up. Workers in `leaving_slots` finish what they have begun,
    as far as `departure_steps` allow, and hand over what they hold. A leaving node stays, with all of its workers, only
    while others lack one of their stages. The first of them can leave first. `failed_slots`: those of them whose node
    has failed. Workers in `slow_slots` take that many times as long as their peers, and get fewer micro-batches.
    `limits_activations`: no worker keeps more activations than in 1F1B.
    """
    inventories = {**inventories, **{slot: WorkerInventory() for slot in arrivals}}
    members = _next_members(old, inventories, arrivals)
    cluster = replace(
        surviving_cluster(setup, inventories, committed, old, plans),
        zones=_zones_by_slot(members, zones),
        nodes=nodes_by_slot(members),
        slow_slots=slow_slots,
    )
    if limits_activations and cluster.memory is None:
        cluster = replace(cluster, memory="1f1b")
    moving_slots = _slots_able_to_move(cluster, moving_slots, leaving_slots)
    departing = _slots_able_to_leave(_cluster_after_moves(cluster, moving_slots), leaving_slots)
    cluster = _cluster_without(cluster, departing, leaving_slots)
    now = assign_roles(cluster)
    layout = assign_roles(_cluster_after_moves(cluster, moving_slots)) if moving_slots else now
    full = cluster.full_plan
    problem = RecoveryProblem(
        stages=full.stages,
        segments=full.segments,
        slot_count=len(full.workers),
        micro_batches=full.micro_batches,
        runners=now.runners,
        first_open_step=committed,
        split=layout.plan.all_backwards_split,
        synchronous_step=setup.synchronous_step,
        costs=cluster.costs,
        default_runners=now.default_runners,
        leaving_slots=departing,
        time_left=departure_steps * time_plan(full, cluster.costs).makespan if departing else math.inf,
        dropped_micros=dropped_micro_batches(old, inventories, committed, now.dropped_micros),
        usual_plan=full if not full.stage_overrides else None,
    )
    kept = {
        slot: _inventory_without_dropped_copies(slot, inventory, (now, layout))
        for slot, inventory in inventories.items()
    }
    recovery = plan_recovery(problem, kept)
    epoch = msgspec.structs.replace(
        old,
        number=number,
        leader=leader,
        members=members,
        plan=layout.plan.to_text(),
        evaluation_plan=evaluation_plan_around(setup.evaluation, layout),
        start=committed + len(recovery.steps),
        committed_steps=committed,
        resume_step=None,
        resume_from=None,
        shadows=tuple(Shadow(r.stage, r.slot, r.source, r.needs_copy, r.moves_worker) for r in layout.shadows),
        dropped_micro_batches=layout.dropped_micros,
        leaving_slots=tuple(departing),
        recovery=recovery,
        layer_moves=(),
        stop_before=None,
    )
    lost = any(before is not None and after is None for before, after in zip(old.members, members, strict=True))
    why = slow_reason if slow_reason and not lost else _explain(old, members, layout, departing, failed_slots)
    return NextEpoch(epoch, why, layout.recovery_source)


def dropped_micro_batches(
    old: Epoch, inventories: Mapping[int, WorkerInventory], committed: int, dropped: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """By open step: the micro-batches left out of it. A step without any complete gradient sum drops what the next
    epoch drops. In any other step some layer may have been updated with the micro-batches the step was started with, so
    all layers must use the same."""
    summed = {step for inventory in inventories.values() for step, _ in inventory.complete_sums}
    newest = max(
        (v for inventory in inventories.values() for v in inventory.weight_versions.values()), default=committed
    )
    open_steps = range(committed, newest + 1)
    return {step: old.dropped_in(step) if step in summed or step < newest else dropped for step in open_steps}


def assign_waiting_nodes(
    setup: RunSetup,
    old: Epoch,
    inventories: Mapping[int, WorkerInventory],
    committed: int,
    waiting: Sequence[Member],
    zones: Mapping[int, str] = NO_ZONES,
) -> dict[int, Member]:
    """Assign slots to waiting workers. Slots without a stand-in for their stage come first, then those whose stage has
    the fewest holders. Each slot goes to the worker whose node, and then whose zone, has the fewest holders of the
    stage. If there are more workers than slots, the others keep waiting."""
    cluster = surviving_cluster(setup, inventories, committed, old, None)
    wanted = vacant_slots(cluster)
    holders = Counter(stage for held in cluster.held_stages.values() for stage in held)
    empty = [slot for slot in sorted(set(cluster.own_runners)) if slot not in inventories]
    empty.sort(key=lambda slot: (slot not in wanted, holders[slot % setup.stages], slot))
    zone_by_slot, node_by_slot = _zones_by_slot(old.members, zones), nodes_by_slot(old.members)
    unassigned, assigned = list(waiting), dict[int, Member]()
    for slot in empty[: len(unassigned)]:
        stage = slot % setup.stages
        holder_slots = [other for other, held in cluster.held_stages.items() if stage in held]
        holders_by_zone = Counter(zone_by_slot.get(other, "") for other in holder_slots)
        holders_by_node = Counter(node_by_slot[other] for other in holder_slots)
        holders_by_node.update(member.node for other, member in assigned.items() if other % setup.stages == stage)
        assigned[slot] = min(
            unassigned, key=lambda member: (holders_by_node[member.node], holders_by_zone[zones.get(member.node, "")])
        )
        unassigned.remove(assigned[slot])
    return assigned


def _zones_by_slot(members: Sequence[Member | None], zones: Mapping[int, str]) -> dict[int, str]:
    """Zone by slot, for the members that have one."""
    return {slot: zones[m.node] for slot, m in enumerate(members) if m is not None and zones.get(m.node)}


def every_stage_has_two_holders(epoch: Epoch) -> bool:
    """Whether every stage has holders on at least two nodes."""
    nodes = nodes_by_slot(epoch.members)
    return all(len({nodes[slot] for slot in each}) > 1 for each in _holders(epoch))


def can_move(policy: RecoveryPolicy, epoch: Epoch, leaving: Collection[int] = ()) -> bool:
    """Whether a worker has a complete copy of the stage it is to move to, and its own stage has enough holders without
    it. False while another stage needs a copy, because a new epoch would start that copy again."""
    nodes = nodes_by_slot(epoch.members)

    def has_enough_holders(slots: Collection[int]) -> bool:
        return policy.has_enough_holders({nodes[slot] for slot in slots})

    holders = [each.difference(leaving) for each in _holders(epoch)]
    if not all(has_enough_holders(each) for each in holders):
        return False
    movers = [shadow.slot for shadow in epoch.shadows if shadow.takes_over_stage and not shadow.needs_copy]
    return any(has_enough_holders(holders[slot % len(holders)] - {slot}) for slot in movers)


def can_leave(epoch: Epoch, leaving_nodes: Collection[int]) -> bool:
    """Whether one of the nodes with notice can leave in the next epoch: other nodes hold everything that it holds."""
    nodes, holders = nodes_by_slot(epoch.members), _holders(epoch)
    still_needed = {nodes[slot] for slot in epoch.staying_slots}.intersection(leaving_nodes)
    return any(all({nodes[slot] for slot in each} != {node} for each in holders) for node in still_needed)


def _holders(epoch: Epoch) -> list[set[int]]:
    """By stage: the slots with a complete copy of it."""
    plan = Plan.from_text(epoch.plan)
    complete_copies = [(shadow.stage, shadow.slot) for shadow in epoch.shadows if not shadow.needs_copy]
    return [
        {*plan.holders_of(stage), *(slot for at, slot in complete_copies if at == stage)}
        for stage in range(plan.stages)
    ]


def _next_members(
    old: Epoch, remaining_slots: Collection[int], arrivals: Mapping[int, Member]
) -> tuple[Member | None, ...]:
    stay = (member if slot in remaining_slots else None for slot, member in enumerate(old.members))
    return tuple(arrivals.get(slot, member) for slot, member in enumerate(stay))


def surviving_cluster(
    setup: RunSetup,
    inventories: Mapping[int, WorkerInventory],
    committed: int,
    old: Epoch | None,
    plans: PlanCache | None,
) -> SurvivingCluster:
    """The surviving cluster as the planner's input."""
    return SurvivingCluster(
        full_plan=Plan.from_text(setup.plan),
        policy=setup.strategy_object,
        held_stages=_stages_by_slot(inventories, committed),
        current_plan=None if old is None else Plan.from_text(old.plan),
        costs=_costs(setup),
        synchronous_step=setup.synchronous_step,
        memory=setup.activations,
        plan_cache=plans or PlanCache(),
    )


def _cluster_after_moves(cluster: SurvivingCluster, moving_slots: Collection[int]) -> SurvivingCluster:
    """The cluster after some workers have left their own stage."""
    stages = cluster.full_plan.stages
    held = {
        slot: stage_set - {slot % stages} if slot in moving_slots else stage_set
        for slot, stage_set in cluster.held_stages.items()
    }
    return replace(cluster, held_stages=held)


def _slots_able_to_move(
    cluster: SurvivingCluster, moving_slots: Collection[int], leaving_slots: Collection[int]
) -> list[int]:
    """The slots of `moving_slots` that can leave their own stage: it has enough holders among those that stay. Better
    balance is never worth a stage that one more loss would destroy."""
    staying = _cluster_without(cluster, leaving_slots, leaving_slots)
    found: list[int] = []
    for slot in sorted(moving_slots):
        held, own = _cluster_after_moves(staying, [*found, slot]).held_stages, slot % cluster.full_plan.stages
        if cluster.policy.has_enough_holders(cluster.nodes_of(w for w, stages in held.items() if own in stages)):
            found.append(slot)
    return found


def _slots_able_to_leave(cluster: SurvivingCluster, leaving_slots: Collection[int]) -> list[int]:
    """The slots of `leaving_slots` that can leave now: a node with the only copy of a stage has to stay as a whole."""
    by_node: dict[int, list[int]] = {}
    for slot in leaving_slots:
        by_node.setdefault(cluster.node_of(slot), []).append(slot)
    going: list[int] = []
    for slots in by_node.values():
        if not stages_without_holder(_cluster_without(cluster, [*going, *slots], leaving_slots)):
            going += slots
    return going


def _cluster_without(
    cluster: SurvivingCluster, departing_slots: Collection[int], leaving_slots: Collection[int]
) -> SurvivingCluster:
    """The cluster after `departing_slots` have left; the other leaving slots stay for now."""
    held = {slot: stages for slot, stages in cluster.held_stages.items() if slot not in departing_slots}
    return replace(cluster, held_stages=held, leaving_slots=frozenset(leaving_slots) - set(departing_slots))


def _stages_by_slot(inventories: Mapping[int, WorkerInventory], committed: int) -> dict[int, frozenset[int]]:
    return {slot: current(inventory, committed) for slot, inventory in inventories.items()}


def current(inventory: WorkerInventory, committed: int) -> frozenset[int]:
    """The stages of which a worker holds a usable copy. A copy older than the committed step cannot catch up, because
    the gradient sums are gone. A copy made after a step that is still open cannot rerun that step."""
    versions, since = inventory.weight_versions, inventory.copied_at
    return frozenset(stage for stage, at in versions.items() if at >= committed >= since.get(stage, committed))


def _inventory_without_dropped_copies(
    slot: int, inventory: WorkerInventory, layouts: Collection[RoleAssignment]
) -> WorkerInventory:
    """The inventory without copies that are neither kept nor needed to complete the open steps."""
    kept: set[int] = set()
    for layout in layouts:
        kept |= {stage for stage, runners in layout.runners.items() if slot in runners}
        kept |= {replica.stage for replica in layout.shadows if replica.slot == slot and not replica.needs_copy}
    versions = {stage: version for stage, version in inventory.weight_versions.items() if stage in kept}
    return msgspec.structs.replace(inventory, weight_versions=versions)


def _costs(setup: RunSetup) -> Costs:
    if not setup.costs:
        return UNIT_COSTS
    forward, inputs, weight = zip(*setup.costs, strict=True)
    return Costs(forward=forward, input=inputs, weight=weight)


def evaluation_plan_around(evaluation: str | None, layout: RoleAssignment) -> str | None:
    """The forward-only evaluation plan, rerouted around empty slots."""
    if evaluation is None or not (layout.plan.failed or layout.plan.stage_overrides):
        return evaluation
    full = Plan.from_text(evaluation)
    floor = RunnerPool(
        stages=full.stages,
        segments=full.segments,
        worker_count=len(layout.plan.workers),
        runners=layout.runners,
        max_lead=None,
    )
    items = [item._replace(kinds=(Kind.F,)) for item in whole_step_items(full.segments, full.micro_batches, split=True)]
    rows = tuple(tuple(task.action for task in row) for row in place_items(items, floor).task_lists)
    plan = layout.plan
    shape = (plan.pipelines, plan.stages, plan.segments, max(full.micro_batches, plan.pipelines))
    return Plan("evaluation", *shape, rows, plan.failed, plan.stage_overrides).to_text()


def _explain(
    old: Epoch,
    members: tuple[Member | None, ...],
    layout: RoleAssignment,
    departing_slots: Collection[int],
    failed_slots: Collection[int],
) -> str:
    gone = [m for m, left in zip(old.members, members, strict=True) if m is not None and left is None]
    lost_nodes = list(dict.fromkeys(member.node for member in gone))
    before = dict(Plan.from_text(old.plan).stage_overrides)
    moved = [
        f"slot {slot} runs stage {stages[0]}"
        for slot, stages in layout.plan.stage_overrides
        if before.get(slot) != stages
    ]
    changes = [*_explain_departures(members, departing_slots, failed_slots), *_explain_arrivals(old, members, layout)]
    if not lost_nodes and changes:
        return "; ".join(changes)
    if not lost_nodes and moved:
        return f"{', '.join(moved)} from now on, so that the empty slot costs less time"
    if not lost_nodes:
        return "no node is lost: messages in flight are sent again"
    nodes = f"node {lost_nodes[0]} is" if len(lost_nodes) == 1 else f"nodes {', '.join(map(str, lost_nodes))} are"
    how = _SOURCE_SENTENCES[layout.recovery_source]
    new_copies = [
        f"stage {r.stage} to slot {r.slot}"
        for r in layout.shadows
        if r.needs_copy and not r.moves_worker and layout.plan.stages_of(r.slot)
    ]
    copies = f"; a new copy of {', '.join(new_copies)} is made, as only one holder is left" if new_copies else ""
    leaving = [f"slot {r.slot} to stage {r.stage}" for r in layout.shadows if r.moves_worker]
    moves = f"; {', '.join(leaving)} will move, so that the empty slot costs less time" if leaving else ""
    return "; ".join([f"{nodes} gone: {how}{copies}{moves}", *changes])


def _explain_departures(
    members: tuple[Member | None, ...], departing_slots: Collection[int], failed_slots: Collection[int]
) -> list[str]:
    failed = {member.node for slot in failed_slots if (member := members[slot]) is not None}
    leaving = [member for slot, member in enumerate(members) if member is not None and slot in departing_slots]
    return [
        f"node {node} raised an exception: it hands over its state, and other holders repeat its actions"
        if node in failed
        else f"node {node} has notice: it finishes what it has begun, hands over its state and leaves"
        for node in dict.fromkeys(member.node for member in leaving)
    ]


def _explain_arrivals(old: Epoch, members: tuple[Member | None, ...], layout: RoleAssignment) -> list[str]:
    """One sentence for each node that joins, and for each that has caught up."""
    before, sentences = Plan.from_text(old.plan), []
    for slot, member in enumerate(members):
        stages = layout.plan.stages_of(slot)
        if member is None:
            continue
        if stages and old.slot_of(member.worker) is not None and not before.stages_of(slot):
            sentences.append(f"{member.label} has caught up and runs stage {stages[0]}")
        elif not stages and old.slot_of(member.worker) is None:
            copies = [str(replica.stage) for replica in layout.shadows if replica.slot == slot]
            sentences.append(f"{member.label} joined; copying stage {' and '.join(copies)} to it")
    return sentences
