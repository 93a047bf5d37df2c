"""Assign every stage to workers when slots are empty: which workers run it and which hold a shadow replica. Pure.

A lost worker's micro-batches go to its peers (the workers of the same stage in other pipelines), or a worker that
holds a shadow replica of the stage stands in for it. A `RecoveryPolicy` says which of the two is preferred; where the
preferred one is impossible, any other holder is used. A stage without a holder cannot be assigned.
"""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from culm.errors import ScheduleError
from culm.plan.recover.place_work import RunnerPool, place_items, whole_step_items
from culm.plan.replan.greedy_planner import PlanSolution
from culm.plan.replan.plan_cache import PlanCache
from culm.plan.replan.plan_case import ActivationLimit, PlanCase, Slot
from culm.plan.replan.slow_nodes import share_micro_batches
from culm.schedule import UNIT_COSTS, Action, Costs, Kind, Plan
from culm.schedule.action import WEIGHT_GRAD_KINDS
from culm.schedule.dry_run import dry_run


class RecoveryPolicy:
    """How stages are replicated and which workers run them after a loss. `culm.strategies.Strategy` extends it.

    The defaults are those of recovery by peers: no replica from the start, peers share the micro-batches of a lost
    worker, and a stage that is left with one holder is copied to a second worker.
    """

    shadows_every_stage: bool = False
    """Every worker holds a shadow replica of its successor's stage from the start (the last worker: of the first)."""
    prefers_stand_ins: bool = False
    """A worker with a shadow replica runs the lost stage, even where peers could share its micro-batches."""
    required_holders: int = 2
    """A stage with fewer holders than this is copied to another worker. 1: only when its last holder is leaving."""
    copies_stages: bool = True
    """Whether stages are copied to other workers at all while the run goes on."""

    def initial_shadows(self, plan: Plan) -> tuple[ShadowReplica, ...]:
        """The shadow replicas that exist from the first step on, for a plan with every slot filled."""
        return successor_shadows(plan) if self.shadows_every_stage else ()

    def assign_roles(self, cluster: SurvivingCluster) -> RoleAssignment:
        """The workers that run and shadow each stage from now on. Every stage of `cluster` has a holder."""
        return assign_every_stage(cluster)

    def stand_in_rank(self, cluster: SurvivingCluster, slot: int, worker: int) -> tuple[float, ...]:
        """Order of the workers that hold the stage of an empty slot: the one with the lowest rank stands in."""
        return stand_in_distance(cluster, slot, worker)

    def has_enough_holders(self, holders: Collection[int]) -> bool:
        """Whether a stage with holders on these nodes needs no further copy."""
        return len(holders) >= self.required_holders


@dataclass(frozen=True, kw_only=True)
class SurvivingCluster:
    """The workers that are left, the stages they hold, and the policy by which stages are assigned to them."""

    full_plan: Plan
    """The plan of the run with every slot filled."""
    policy: RecoveryPolicy
    held_stages: Mapping[int, frozenset[int]]
    """By filled slot: the stages whose complete state its worker holds."""
    current_plan: Plan | None = None
    """The plan until now: a worker that stands in for another one continues to do so."""
    costs: Costs = UNIT_COSTS
    synchronous_step: bool = False
    memory: ActivationLimit = None
    leaving_slots: frozenset[int] = frozenset()
    """Slots whose workers have notice but are still needed."""
    plan_cache: PlanCache = field(default_factory=PlanCache)
    """Plans made earlier, some of them before the loss."""
    zones: Mapping[int, str] = field(default_factory=dict)
    """By filled slot: the zone of its node, where it is known."""
    nodes: Mapping[int, int] = field(default_factory=dict)
    """By filled slot: its node. Empty: every worker has a node of its own."""
    slow_slots: Mapping[int, float] = field(default_factory=dict)
    """By slot of a slow worker: how many times as long as its peers it takes."""

    def node_of(self, slot: int) -> int:
        """The node of the worker that fills a slot. Workers of one node are lost together."""
        return self.nodes.get(slot, slot)

    def nodes_of(self, slots: Iterable[int]) -> set[int]:
        return {self.node_of(slot) for slot in slots}

    def node_holds(self, slot: int, stage: int) -> bool:
        """Whether another worker of the slot's node holds a stage."""
        node = self.node_of(slot)
        return any(
            other != slot and stage in held and self.node_of(other) == node for other, held in self.held_stages.items()
        )

    @cached_property
    def own_runners(self) -> tuple[int, ...]:
        """By (pipeline, stage), numbered like slots: the slot whose worker runs it when no worker is missing. In
        pipelines with fewer workers than stages a worker runs several stages."""
        full = self.full_plan
        every = range(len(full.workers))
        if not full.stage_overrides:
            return tuple(every)
        own = {(slot // full.stages, stage): slot for slot in every for stage in full.stages_of(slot)}
        return tuple(own[divmod(slot, full.stages)] for slot in every)


@dataclass(frozen=True)
class ShadowReplica:
    """A copy of a stage on a worker that does not run it."""

    stage: int
    slot: int
    """The slot whose worker holds the replica."""
    source: int
    """The slot whose worker sends it the reduced gradients."""
    needs_copy: bool = False
    """Whether the state has to be copied first."""
    moves_worker: bool = False
    """Once the copy is complete the worker leaves its own stage for this one, where a missing worker costs more."""


@dataclass(frozen=True)
class RoleAssignment:
    """The plan from now on, and the shadow replicas beside it."""

    plan: Plan
    runners: Mapping[int, tuple[int, ...]]
    """By stage: the slots whose workers run it."""
    shadows: tuple[ShadowReplica, ...]
    default_runners: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (segment, micro-batch): the slot that runs it. Runners of the stage share the others."""
    recovery_source: str = "peers"
    """Where the lost layers are now: peers or shadow; drop: their micro-batches are not run."""
    dropped_micros: tuple[int, ...] = ()
    """Micro-batches that are not run."""


def stages_without_holder(cluster: SurvivingCluster) -> list[int]:
    """The stages that no worker holds."""
    held_anywhere = {stage for held in cluster.held_stages.values() for stage in held}
    return [stage for stage in range(cluster.full_plan.stages) if stage not in held_anywhere]


def assign_roles(cluster: SurvivingCluster) -> RoleAssignment:
    """The workers that run and shadow each stage, by the policy of the cluster. Every stage has a holder (see
    `stages_without_holder`)."""
    return cluster.policy.assign_roles(cluster)


def complete_pipelines(cluster: SurvivingCluster) -> list[int]:
    """The pipelines in which no worker is missing."""
    D, P = cluster.full_plan.pipelines, cluster.full_plan.stages
    return [d for d in range(D) if all(_holds_own_stage(cluster, slot) for slot in range(d * P, (d + 1) * P))]


def drop_incomplete_pipelines(cluster: SurvivingCluster, complete: Collection[int]) -> RoleAssignment:
    """Only complete pipelines go on, each with its own micro-batches. The micro-batches of the others are dropped, and
    their workers only update their state, until a new worker fills the empty slot."""
    full, P = cluster.full_plan, cluster.full_plan.stages
    resting = tuple(slot for slot in range(len(full.workers)) if slot // P not in complete)
    rows = tuple(() if slot in resting else row for slot, row in enumerate(full.workers))
    runners = {stage: tuple(d * P + stage for d in complete) for stage in range(P)}
    shares = full.micros_by_pipeline
    home = {(g, m): d * P + g % P for d in complete for m in shares[d] for g in range(full.segments)}
    copies = (*_choose_shadows(cluster, runners), *_new_shadows(cluster, runners, _newcomer_copies(cluster, runners)))
    dropped = tuple(micro for d, share in enumerate(shares) for micro in share if d not in complete)
    return RoleAssignment(replace(full, workers=rows, failed=resting), runners, copies, home, "drop", dropped)


def _new_shadows(
    cluster: SurvivingCluster, runners: Mapping[int, tuple[int, ...]], wanted: Iterable[tuple[int, int]]
) -> list[ShadowReplica]:
    """Replicas to be copied to newcomers, given as (worker, stage)."""
    return [
        ShadowReplica(stage, worker, _source_runner(cluster, runners[stage], worker), needs_copy=True)
        for worker, stage in wanted
    ]


def assign_every_stage(cluster: SurvivingCluster) -> RoleAssignment:
    """Every micro-batch is run: by its own worker, by a stand-in, or by peers."""
    stand_ins = _choose_stand_ins(cluster)
    runners = {stage: _stage_runners(cluster, stage, stand_ins) for stage in range(cluster.full_plan.stages)}
    home = _default_runners(cluster, stand_ins)
    if cluster.slow_slots:
        home = share_micro_batches(cluster.full_plan, runners, home, cluster.slow_slots)
    plan = _plan_around_failures(cluster, runners, stand_ins, home)
    moving = _relocation_copies(cluster, stand_ins)
    replicas = [
        replace(replica, moves_worker=(replica.slot, replica.stage) in moving)
        for replica in _choose_shadows(cluster, runners, movers={worker for worker, _ in moving})
    ]
    known = {(replica.slot, replica.stage) for replica in replicas}
    more = [
        ShadowReplica(
            stage, worker, _source_runner(cluster, runners[stage], worker), needs_copy=True, moves_worker=moves
        )
        for found, moves in ((_newcomer_copies(cluster, runners), False), (moving, True))
        for worker, stage in found
        if (worker, stage) not in known
    ]
    return RoleAssignment(plan, runners, (*replicas, *more), home, "shadow" if stand_ins else "peers")


def _default_runners(cluster: SurvivingCluster, stand_ins: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """By (segment, micro-batch): the worker of its pipeline, or its stand-in. Peers share the others."""
    full = cluster.full_plan
    home: dict[tuple[int, int], int] = {}
    for pipeline, micros in enumerate(full.micros_by_pipeline):
        for segment in range(full.segments):
            slot = pipeline * full.stages + segment % full.stages
            worker = cluster.own_runners[slot] if _holds_own_stage(cluster, slot) else stand_ins.get(slot)
            home |= {(segment, micro): worker for micro in micros} if worker is not None else {}
    return home


def successor_shadows(plan: Plan) -> tuple[ShadowReplica, ...]:
    """A shadow replica of each worker's successor in its pipeline; the last worker shadows the first."""
    if plan.stages < 2:
        return ()
    found = []
    for first in range(0, len(plan.workers), plan.stages):
        chain = [slot for slot in range(first, first + plan.stages) if slot not in plan.failed]
        for slot, after in zip(chain, [*chain[1:], chain[0]], strict=True):
            found += [ShadowReplica(stage, slot, after) for stage in plan.stages_of(after) if after != slot]
    return tuple(found)


def shadows_on_other_nodes(
    replicas: Iterable[ShadowReplica], plan: Plan, nodes: Mapping[int, int], zones: Mapping[int, str] | None = None
) -> tuple[ShadowReplica, ...]:
    """Move every replica that shares a node with the worker it shadows to a worker of another node, if there is one.

    `nodes` and `zones` are by filled slot. Preferred is a node without a holder of the stage, then another zone, then
    the worker with the fewest replicas, then the nearest predecessor. Where every worker has a node of its own, no
    replica moves.
    """
    kept = [r for r in replicas if r.slot not in nodes or nodes[r.slot] != nodes.get(r.source)]
    moving = [replica for replica in replicas if replica not in kept]
    load = Counter(replica.slot for replica in kept)
    zones = zones or {}
    for replica in moving:
        others = [r.slot for r in kept if r.stage == replica.stage and r.slot in nodes]
        holder_nodes = Counter(nodes[slot] for slot in (*plan.holders_of(replica.stage), *others) if slot in nodes)
        able = [
            slot
            for slot, node in nodes.items()
            if node != nodes[replica.source] and replica.stage not in plan.stages_of(slot) and slot not in others
        ]
        if not able:
            kept.append(replica)
            continue
        chosen = min(able, key=partial(_replica_rank, replica, plan, nodes, zones, holder_nodes, load))
        load[chosen] += 1
        kept.append(replace(replica, slot=chosen))
    return tuple(sorted(kept, key=lambda r: r.slot)) if moving else tuple(kept)


def _replica_rank(
    replica: ShadowReplica,
    plan: Plan,
    nodes: Mapping[int, int],
    zones: Mapping[int, str],
    holder_nodes: Mapping[int, int],
    load: Mapping[int, int],
    slot: int,
) -> tuple[int, bool, int, int, int, int]:
    """Order of the workers that could hold a replica: the lowest rank is chosen."""
    P = plan.stages
    near = zones.get(slot) is not None and zones.get(slot) == zones.get(replica.source)
    pipeline_distance = (
        replica.source // P - slot // P
    ) % plan.pipelines  # in a circle, so that no two choose the same
    distance = pipeline_distance, (replica.source - slot) % P
    return holder_nodes.get(nodes[slot], 0), near, load.get(slot, 0), *distance, slot


def _holds_own_stage(cluster: SurvivingCluster, slot: int) -> bool:
    """Whether the slot is filled and its worker holds the stage of the slot."""
    return slot % cluster.full_plan.stages in cluster.held_stages.get(cluster.own_runners[slot], ())


def _relocated_workers(cluster: SurvivingCluster) -> dict[int, int]:
    """By empty slot: the worker that left its own stage to fill it."""
    P = cluster.full_plan.stages
    found: dict[int, int] = {}
    for worker, held in sorted(cluster.held_stages.items()):
        if cluster.current_plan is None or _holds_any_own_stage(cluster, worker):
            continue
        empty = [
            slot
            for slot in range(len(cluster.full_plan.workers))
            if slot % P in held and not _holds_own_stage(cluster, slot)
        ]
        chosen = next((slot for slot in empty if slot not in found), None)
        if chosen is not None:
            found[chosen] = worker
    return found


def vacant_slots(cluster: SurvivingCluster) -> list[int]:
    """The slots without a worker: neither their own nor one that moved there."""
    moved = _relocated_workers(cluster)
    return [
        slot
        for slot in range(len(cluster.full_plan.workers))
        if not _holds_own_stage(cluster, slot) and slot not in moved
    ]


def newcomer_slots(cluster: SurvivingCluster) -> list[int]:
    """The slots of workers that have joined and hold no stage yet."""
    return [slot for slot, held in sorted(cluster.held_stages.items()) if not held]


def _newcomer_copies(cluster: SurvivingCluster, runners: Mapping[int, tuple[int, ...]]) -> list[tuple[int, int]]:
    """(worker, stage): the copies that newcomers get, to run once they have caught up: the stage of their own slot or,
    if another worker has moved there, the stage with the fewest runners."""
    free, found = vacant_slots(cluster), []
    for worker in newcomer_slots(cluster):
        slot = min(free, key=partial(_newcomer_rank, cluster, runners, worker))
        theirs = [other for other in free if cluster.own_runners[other] == cluster.own_runners[slot]]
        free = [other for other in free if other not in theirs]
        found += [(worker, other % cluster.full_plan.stages) for other in theirs]
    some = [
        slot for slot in free if _holds_any_own_stage(cluster, cluster.own_runners[slot])
    ]  # a worker that holds some of its stages gets the others
    return found + [(cluster.own_runners[slot], slot % cluster.full_plan.stages) for slot in some]


def _newcomer_rank(
    cluster: SurvivingCluster, runners: Mapping[int, tuple[int, ...]], worker: int, slot: int
) -> tuple[bool, bool, int, int]:
    """Order of the empty slots that a newcomer could fill: the lowest rank is chosen."""
    stage = slot % cluster.full_plan.stages
    return slot != worker, cluster.node_holds(worker, stage), len(runners[stage]), slot


def _holds_any_own_stage(cluster: SurvivingCluster, worker: int) -> bool:
    return not cluster.held_stages.get(worker, frozenset()).isdisjoint(cluster.full_plan.stages_of(worker))


def _choose_stand_ins(cluster: SurvivingCluster) -> dict[int, int]:
    """By empty slot: the worker that stands in for it, where no peer is left or the policy prefers stand-ins."""
    P = cluster.full_plan.stages
    found = _relocated_workers(cluster)
    load: Counter[int] = Counter(found.values())
    for slot in range(len(cluster.full_plan.workers)):
        stage = slot % P
        if _holds_own_stage(cluster, slot) or slot in found:
            continue
        peers = any(_holds_own_stage(cluster, peer) for peer in range(stage, len(cluster.full_plan.workers), P))
        if peers and not cluster.policy.prefers_stand_ins:
            continue
        assigned = {worker for full, worker in found.items() if full % P == stage}
        posted = cluster.own_runners[stage::P]
        able = [w for w, held in cluster.held_stages.items() if stage in held and w not in posted and w not in assigned]
        if able:
            rank = cluster.policy.stand_in_rank
            found[slot] = min(able, key=lambda other: (rank(cluster, slot, other), load[other], other))
            load[found[slot]] += 1
    return found


def stand_in_distance(cluster: SurvivingCluster, slot: int, worker: int) -> tuple[bool, bool, int]:
    """Rank of a worker that could stand in for an empty slot: one that does so already comes first, then the nearest
    predecessor in the same pipeline, then workers of other pipelines."""
    P = cluster.full_plan.stages
    stands_in_already = (
        cluster.current_plan is not None
        and slot % P in cluster.current_plan.stages_of(worker)
        and worker // P == slot // P
    )
    return not stands_in_already, worker // P != slot // P, (slot - worker) % P


def _stage_runners(cluster: SurvivingCluster, stage: int, stand_ins: Mapping[int, int]) -> tuple[int, ...]:
    P = cluster.full_plan.stages
    own = [
        cluster.own_runners[slot]
        for slot in range(stage, len(cluster.full_plan.workers), P)
        if _holds_own_stage(cluster, slot)
    ]
    return tuple(sorted({*own, *(worker for slot, worker in stand_ins.items() if slot % P == stage)}))


def _plan_around_failures(
    cluster: SurvivingCluster,
    runners: Mapping[int, tuple[int, ...]],
    stand_ins: Mapping[int, int],
    home: Mapping[tuple[int, int], int],
) -> Plan:
    """Where peers alone share the work: by the re-routing planner, with split backward. Else, and where workers are
    slow, by list scheduling."""
    full = cluster.full_plan
    failed = tuple(slot for slot in range(len(full.workers)) if not _holds_own_stage(cluster, slot))
    if cluster.slow_slots:
        slow = cluster.slow_slots
        split = full.all_backwards_split
        # A limit leaves no room for more activations than 1F1B keeps.
        leads = (0, 1, 2, None) if cluster.memory is None else (0,)
        return plan_merged_stages(
            full, runners, home, cluster.costs, split_backward=split, slow_slots=slow, max_leads=leads
        )
    if not failed:
        return full
    moved = _relocated_workers(cluster)
    if stand_ins == moved and _one_segment_per_worker(full):
        left = set(failed) - set(moved)
        return _apply_relocations(
            cluster.plan_cache.plan_for(_plan_case(cluster, left)).plan if left else full, cluster, moved
        )
    return plan_merged_stages(full, runners, home, cluster.costs, split_backward=full.all_backwards_split)


def _one_segment_per_worker(full: Plan) -> bool:
    """Whether every worker runs one segment, as the re-routing planner assumes."""
    return full.segments == full.stages and not full.stage_overrides


def _plan_case(cluster: SurvivingCluster, failed: Collection[int]) -> PlanCase:
    full = cluster.full_plan
    return PlanCase(
        pipelines=full.pipelines,
        stages=full.stages,
        micro_batches=full.micro_batches,
        costs=cluster.costs,
        failed=frozenset(Slot(*divmod(slot, full.stages)) for slot in failed),
        stagger=not cluster.synchronous_step,
        memory=cluster.memory,
    )


def _apply_relocations(plan: Plan, cluster: SurvivingCluster, relocations: Mapping[int, int]) -> Plan:
    """The same plan, in which workers that moved run the action lists of the slots that they fill."""
    rows = [() if slot in relocations else row for slot, row in enumerate(plan.workers)]
    for slot, worker in relocations.items():  # another worker may have moved to this worker's own slot
        rows[worker] = plan.workers[slot]
    fills = relocations.values()
    failed = tuple(slot for slot in range(len(rows)) if not _holds_own_stage(cluster, slot) and slot not in fills)
    held = tuple(sorted((worker, (slot % plan.stages,)) for slot, worker in relocations.items()))
    return replace(plan, workers=tuple(rows), failed=failed, stage_overrides=held)


def precompute_next_plans(cluster: SurvivingCluster) -> Iterator[PlanSolution]:
    """Plan for the loss of any one more node, one plan at a time, so that the plan exists when the loss happens.

    Yields nothing where stand-ins would run the lost stage: if the policy prefers them, or if a stage has lost all
    workers of its own.
    """
    full = cluster.full_plan
    if cluster.policy.prefers_stand_ins or not _one_segment_per_worker(full) or full.pipelines == 1:
        return
    moved = _relocated_workers(cluster)
    failed = {slot for slot in range(len(full.workers)) if not _holds_own_stage(cluster, slot)} - set(moved)
    if any(failed.issuperset(range(stage, len(full.workers), full.stages)) for stage in range(full.stages)):
        return
    by_node: dict[int, list[Slot]] = {}
    for slot in range(len(full.workers)):
        if slot not in failed:
            by_node.setdefault(cluster.node_of(moved.get(slot, slot)), []).append(Slot(*divmod(slot, full.stages)))
    yield from cluster.plan_cache.plan_next_losses(_plan_case(cluster, failed), by_node.values())


def _relocation_copies(cluster: SurvivingCluster, stand_ins: Mapping[int, int]) -> list[tuple[int, int]]:
    """(worker, stage): workers that should move to another stage, so that empty slots slow the step down least."""
    full = cluster.full_plan
    if cluster.policy.prefers_stand_ins or not _one_segment_per_worker(full) or full.pipelines == 1 or stand_ins:
        return []
    if newcomer_slots(cluster):
        return []
    failed = {slot for slot in range(len(full.workers)) if not _holds_own_stage(cluster, slot)}
    if len(failed) < 2:
        return []
    _, normal = cluster.plan_cache.plan_after_moves(_plan_case(cluster, failed))
    found = [(move.source.pipeline * full.stages + move.source.stage, move.target.stage) for move in normal.moves]
    # A second holder on the same node would be lost together with the first.
    return [(worker, stage) for worker, stage in found if not cluster.node_holds(worker, stage)]


def plan_merged_stages(
    full: Plan,
    runners: Mapping[int, tuple[int, ...]],
    default_runners: Mapping[tuple[int, int], int],
    costs: Costs,
    *,
    split_backward: bool,
    slow_slots: Mapping[int, float] | None = None,
    max_leads: tuple[int | None, ...] = (0,),
) -> Plan:
    """A plan of the shape of `full` in which workers run several stages, or other micro-batches than their own.
    Backward is split if `split_backward`, and where that makes the step shorter. Workers in `slow_slots` take that many
    times as long. `max_leads`: how many more forwards than in 1F1B a worker may run ahead; the shortest plan is kept.
    """
    pools = [
        RunnerPool(
            stages=full.stages,
            segments=full.segments,
            worker_count=len(full.workers),
            runners=runners,
            costs=costs,
            max_lead=lead,
            slow_workers=slow_slots or {},
        )
        for lead in max_leads
    ]
    steps = (
        whole_step_items(full.segments, full.micro_batches, split=split) for split in sorted({split_backward, True})
    )
    placed = min(
        (place_items(lots, pool, default_runners) for lots in steps for pool in pools),
        key=lambda placed: placed.makespan,
    )
    stages = [tuple(stage for stage, slots in runners.items() if slot in slots) for slot in range(len(full.workers))]
    lists = [[task.action for task in row] for row in placed.task_lists]
    try:
        plan = _with_reduce_and_step(full, lists, stages, early=True)
        collections.deque(dry_run(plan), maxlen=0)
    except ScheduleError:  # reduces that wait for each other in a cycle are run in order at the end
        plan = _with_reduce_and_step(full, lists, stages, early=False)
    return plan


def _with_reduce_and_step(full: Plan, lists: list[list[Action]], stages: list[tuple[int, ...]], *, early: bool) -> Plan:
    """The action lists of all slots with R and S added, as a plan. A worker without actions counts as failed."""
    rows = tuple(
        _row_with_reduce_and_step(actions, held, full, early) for actions, held in zip(lists, stages, strict=True)
    )
    others = tuple((slot, held) for slot, held in enumerate(stages) if held and held != (slot % full.stages,))
    failed = tuple(slot for slot, row in enumerate(rows) if not row)
    shape = (full.pipelines, full.stages, full.segments, full.micro_batches)
    return Plan("merged", *shape, rows, failed, others, full.micro_batch_shares)


def _row_with_reduce_and_step(
    actions: list[Action], stages: tuple[int, ...], full: Plan, early: bool
) -> tuple[Action, ...]:
    """Add R after the last weight gradient of each segment of the row (at the start where there is none) or, if not
    `early`, after all actions; and S at the end."""
    segments = [segment for segment in range(full.segments) if segment % full.stages in stages]
    last = (
        {action.segment: index for index, action in enumerate(actions) if action.kind in WEIGHT_GRAD_KINDS}
        if early
        else {}
    )
    out = [Action(segment, Kind.R) for segment in segments if early and segment not in last]
    for index, action in enumerate(actions):
        out.append(action)
        if last.get(action.segment) == index:
            out.append(Action(action.segment, Kind.R))
    out += [Action(segment, Kind.R) for segment in segments if not early]
    return (*out, *(Action(segment, Kind.S) for segment in segments))


def _choose_shadows(
    cluster: SurvivingCluster, runners: Mapping[int, tuple[int, ...]], movers: Collection[int] = ()
) -> tuple[ShadowReplica, ...]:
    """The replicas that exist beside the runners', and new ones where the policy makes copies.

    A stage gets a new replica if it has holders on fewer nodes than the policy requires. It also gets one if all its
    holders are in one zone, which may be lost as a whole, and a worker in another zone holds nothing but its own stage.
    A new replica goes to a node without a holder of the stage. A worker in `movers` gives up its own stage, so it does
    not count among the holders of that stage.
    """
    found = [
        ShadowReplica(stage, slot, _source_runner(cluster, runners[stage], slot))
        for slot, held in sorted(cluster.held_stages.items())
        for stage in sorted(held)
        if slot not in runners[stage]
    ]
    load = Counter({slot: len(held) for slot, held in cluster.held_stages.items()})
    policy = cluster.policy
    for stage in range(cluster.full_plan.stages):
        holders = {*runners[stage], *(replica.slot for replica in found if replica.stage == stage)}
        holder_nodes = cluster.nodes_of(holders)
        able = [
            slot
            for slot in cluster.held_stages
            if cluster.node_of(slot) not in holder_nodes and slot not in cluster.leaving_slots
        ]
        movers_here = {slot for slot in movers if slot % cluster.full_plan.stages == stage}
        if policy.has_enough_holders(cluster.nodes_of(holders - cluster.leaving_slots - movers_here)):
            spreads = policy.required_holders > 1
            spreads = spreads and bool(cluster.zones)
            able = [slot for slot in able if load[slot] == 1 and _adds_zone(cluster, slot, holders)] if spreads else []
        if able and policy.copies_stages:
            near = {cluster.zones.get(slot) for slot in holders} - {None}
            chosen = min(
                able, key=lambda w: (cluster.zones.get(w) in near, load[w], (stage - w) % cluster.full_plan.stages, w)
            )
            load[chosen] += 1
            found.append(ShadowReplica(stage, chosen, _source_runner(cluster, runners[stage], chosen), needs_copy=True))
    return tuple(found)


def _adds_zone(cluster: SurvivingCluster, slot: int, holders: Set[int]) -> bool:
    """Whether all holders are in one zone and the worker of the slot is in another one."""
    zones = {cluster.zones.get(holder) for holder in holders - cluster.leaving_slots}
    return len(zones) == 1 and zones.isdisjoint({cluster.zones.get(slot), None}) and slot in cluster.zones


def _source_runner(cluster: SurvivingCluster, runners: tuple[int, ...], slot: int) -> int:
    """The runner that sends reduced gradients to a replica: that of its own pipeline, if there is one."""
    P = cluster.full_plan.stages
    return min(runners, key=lambda runner: (runner // P != slot // P, runner))
