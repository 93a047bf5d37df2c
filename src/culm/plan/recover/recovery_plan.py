"""Recovery: from the survivors' inventories to a plan that completes every open step. Pure.

`lineage` finds the missing work, `place_work` assigns it to holders. This module combines both and derives the rest
from the placement: which worker sends which kept tensor to which, whose sums are reduced, which workers send a complete
sum to those that lack it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from culm.plan.recover.affected_pipelines import SplitRecovery, split_recovery
from culm.plan.recover.handoff_plan import (
    PartialSumTransfer,
    RecoverySchedule,
    fit_into_notice,
    partial_sum_transfers,
    prefer_staying_holders,
    schedule_items,
)
from culm.plan.recover.lineage import MissingWork, WorkerInventory, WorkKey, find_missing_work
from culm.plan.recover.place_work import RunnerPool
from culm.plan.recover.recovery_bound import RecoveryBound, recovery_bound
from culm.plan.recover.task_dependencies import StepTask
from culm.schedule import UNIT_COSTS, Action, Costs, Kind, Plan
from culm.schedule.action import INPUT_GRAD_KINDS

PartialSumKey = tuple[int, int, int]
"""(step, segment, slot): the gradient sum of one worker, which has not been reduced with those of the others yet."""


class RecoveryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How the open steps are completed: what a worker does first in a new epoch."""

    steps: tuple[int, ...] = ()
    task_lists: tuple[tuple[tuple[int, str, bool], ...], ...] = ()
    """By slot: (step, action, whether only its output is needed), in order."""
    keepers: dict[str, tuple[int, ...]] = {}
    """By step and tensor name ("5 2F0"): the workers that keep a needed tensor which no task produces."""
    complete_sums: tuple[tuple[int, int, int], ...] = ()
    """(step, segment, slot): sums that are complete already, and one worker that has each."""
    discarded: tuple[PartialSumKey, ...] = ()
    """Sums of single workers that are not valid: each worker clears its own before it adds anything to it."""
    partial_sum_transfers: tuple[PartialSumTransfer, ...] = ()
    """The sums that leaving workers send to others before the reduction."""
    weight_versions: tuple[dict[int, int], ...] = ()
    """By slot that stays, by stage held: the step that its weights are for."""
    runners: dict[int, tuple[tuple[int, ...], ...]] = {}
    """By step, by segment: the workers whose sums are reduced."""
    dropped_micros: dict[int, tuple[int, ...]] = {}
    """By step: the micro-batches that are not trained on (strategy drop)."""
    redone_actions: int = 0
    """How many of the actions had been finished before, as far as the survivors know."""
    makespan: float = 0.0
    """Time of the placed actions, in the unit of the costs."""
    lower_bound: float = 0.0
    """No placement takes less time."""

    def tasks_of(self, slot: int) -> list[StepTask]:
        return [
            StepTask(step, Action.parse(action), output_only) for step, action, output_only in self.task_lists[slot]
        ]

    def holder_of_sum(self, step: int, segment: int) -> int | None:
        """The worker that has the complete sum already; None: it has to be reduced first."""
        return next((slot for s, g, slot in self.complete_sums if (s, g) == (step, segment)), None)

    def slots_missing_sum(self, step: int, stage: int) -> list[int]:
        """The holders of a stage whose weights do not include a step yet: each needs its complete sum."""
        return [slot for slot, versions in enumerate(self.weight_versions) if versions.get(stage, step + 1) <= step]

    def slots_behind(self, step: int) -> list[int]:
        """The workers that have not finished a step in all of their stages."""
        return [
            slot
            for slot, versions in enumerate(self.weight_versions)
            if any(version <= step for version in versions.values())
        ]


class RecoveryTransfers:
    """The transfers that follow from the placement of a recovery: which worker receives what from which."""

    def __init__(self, recovery: RecoveryPlan, segments: int) -> None:
        self._keepers = recovery.keepers
        self._runner: dict[str, int] = {}
        self._consumers: dict[str, list[int]] = {}
        for slot in range(len(recovery.task_lists)):
            for step, action, _ in recovery.tasks_of(slot):
                produced, required = produced_tensor(action), required_tensor(action, segments)
                if produced is not None:
                    self._runner[f"{step} {produced}"] = slot
                if required is not None:
                    self._consumers.setdefault(f"{step} {required}", []).append(slot)

    def source_of(self, step: int, name: Action, slot: int) -> int:
        """The worker that `slot` receives a tensor from: its runner or a keeper; `slot` itself if it is one of them."""
        runner = self._runner.get(f"{step} {name}")
        if runner is not None:
            return runner
        keepers = self._keepers[f"{step} {name}"]
        return slot if slot in keepers else keepers[0]

    def consumers_of(self, step: int, name: Action | str) -> list[int]:
        """The workers that need a tensor of an open step."""
        return self._consumers.get(f"{step} {name}", [])

    def tensors_to_resend(self, step: int, slot: int) -> list[tuple[str, list[int]]]:
        """The tensors of an open step that a worker keeps and others need: (name, these workers)."""
        resends = []
        for key, keepers in self._keepers.items():
            key_step, _, name = key.partition(" ")
            if int(key_step) == step and keepers[0] == slot:
                resends.append(
                    (name, [consumer for consumer in self.consumers_of(step, name) if consumer not in keepers])
                )
        return resends


@dataclass(frozen=True, kw_only=True)
class RecoveryProblem:
    """The inputs of a recovery besides the inventories."""

    stages: int
    segments: int
    slot_count: int
    micro_batches: int
    runners: Mapping[int, Sequence[int]]
    """By stage: the workers that run it from now on. Each holds the stage; every stage has at least one."""
    first_open_step: int
    """The first step that is not committed."""
    split: bool = True
    """Whether the plan from now on splits the backward. If not, the recovery may still split it if that is shorter."""
    synchronous_step: bool = False
    costs: Costs = UNIT_COSTS
    default_runners: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (segment, micro-batch): the worker that runs it in the plan from now on."""
    leaving_slots: Collection[int] = ()
    """Slots whose workers leave and so are not runners: they finish what they have started and hand off the rest."""
    time_left: float = math.inf
    """How much longer the leaving workers run, in the unit of the costs."""
    dropped_micros: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By open step: the micro-batches that are not trained on."""
    usual_plan: Plan | None = None
    """The plan with every slot filled. In a large cluster, pipelines that a loss does not touch continue in its
    order."""


def plan_recovery(problem: RecoveryProblem, inventories: Mapping[int, WorkerInventory]) -> RecoveryPlan:
    """The smallest set of actions that completes all open steps, placed on holders."""
    steps = tuple(range(problem.first_open_step, _newest_open_step(inventories, problem.first_open_step) + 1))
    usable = {slot: _usable_inventory(inventory, slot, problem) for slot, inventory in inventories.items()}
    discarded = find_discarded_sums(inventories, usable, problem.dropped_micros, problem.leaving_slots)
    usable = {slot: _without_sums(inventory, slot, discarded) for slot, inventory in usable.items()}
    staying = {slot: inventory for slot, inventory in inventories.items() if slot not in problem.leaving_slots}
    pool = RunnerPool(
        stages=problem.stages,
        segments=problem.segments,
        worker_count=problem.slot_count,
        runners=problem.runners,
        other_holders={
            stage: _holders_not_running(staying, stage, problem.runners[stage]) for stage in range(problem.stages)
        },
        leaving_workers=problem.leaving_slots,
        costs=problem.costs,
        synchronous_step=problem.synchronous_step,
    )
    missing_work = partial(
        find_missing_work,
        steps=steps,
        segments=problem.segments,
        micro_batches=problem.micro_batches,
        dropped_micros=problem.dropped_micros,
    )

    divide = partial(split_recovery, pool=pool, usual_plan=problem.usual_plan, default_runners=problem.default_runners)
    all_missing = missing_work(usable, split=True)
    all_work = divide(all_missing.items)
    bound = recovery_bound(all_work.items, pool)

    def attempt(inventories: Mapping[int, WorkerInventory]) -> tuple[MissingWork, RecoverySchedule]:
        attempts: list[tuple[MissingWork, RecoverySchedule]] = []
        for split in (True,) if problem.split else (False, True):
            if split and not problem.leaving_slots:  # nothing of the inventories is left out
                missing, work = all_missing, all_work
            else:
                missing = missing_work(inventories, split=split)
                work = divide(missing.items)
            attempts.append((missing, _schedule(work, problem, bound)))
            if attempts[-1][1].makespan <= bound.makespan + 1e-9:  # meets the lower bound
                break
        return min(attempts, key=lambda pair: pair[1].makespan)

    missing, schedule = fit_into_notice(usable, problem.leaving_slots, problem.time_left, attempt)
    missing = prefer_staying_holders(missing, problem.leaving_slots)
    runners = {step: _contributors_by_segment(step, usable, schedule.task_lists, problem) for step in steps}
    return RecoveryPlan(
        steps=steps,
        task_lists=tuple(
            tuple((step, str(action), output_only) for step, action, output_only in row) for row in schedule.task_lists
        ),
        keepers=_keepers_of_inputs(schedule.task_lists, missing, problem),
        complete_sums=tuple(
            sorted((step, g, slots[0]) for (step, g), slots in missing.complete_sums.items() if step in steps)
        ),
        discarded=tuple(sorted(discarded)),
        partial_sum_transfers=partial_sum_transfers(
            usable, schedule.task_lists, missing.complete_sums, runners, problem.leaving_slots
        ),
        weight_versions=tuple(
            staying[slot].weight_versions if slot in staying else {} for slot in range(problem.slot_count)
        ),
        runners=runners,
        dropped_micros={step: problem.dropped_micros[step] for step in steps if problem.dropped_micros.get(step)},
        redone_actions=_count_redone(schedule.task_lists, inventories, problem.leaving_slots),
        makespan=schedule.makespan,
        lower_bound=bound.makespan,
    )


def _schedule(work: SplitRecovery, problem: RecoveryProblem, bound: RecoveryBound) -> RecoverySchedule:
    """Place the work of the affected pipelines, and let the others continue."""
    placed = schedule_items(work.items, work.pool, problem.default_runners, problem.leaving_slots, bound)
    makespan = max(placed.makespan, work.usual_work)
    return replace(placed, task_lists=work.merge(placed.task_lists), makespan=makespan)


def _newest_open_step(inventories: Mapping[int, WorkerInventory], first: int) -> int:
    """The newest step that any worker has started; `first - 1` if none has."""
    started = [version - 1 for inventory in inventories.values() for version in inventory.weight_versions.values()]
    for inventory in inventories.values():
        started += [
            key.step
            for keys in (inventory.tapes_after_forward, inventory.tapes_after_input_grad, inventory.accumulated_grads)
            for key in keys
        ]
        started += [step for step, _ in inventory.complete_sums]
    return max(started, default=first - 1)


def _usable_inventory(inventory: WorkerInventory, slot: int, problem: RecoveryProblem) -> WorkerInventory:
    """The part of an inventory that counts. Tapes and sums count if the worker runs the stage from now on, or if it
    leaves and hands them off; a shadow that is not needed keeps its tapes for itself."""
    if slot in problem.leaving_slots:
        return inventory
    own_stages = {stage for stage, runners in problem.runners.items() if slot in runners}

    def in_own_stages(keys: Iterable[WorkKey]) -> tuple[WorkKey, ...]:
        return tuple(key for key in keys if key.segment % problem.stages in own_stages)

    return msgspec.structs.replace(
        inventory,
        tapes_after_forward=in_own_stages(inventory.tapes_after_forward),
        tapes_after_input_grad=in_own_stages(inventory.tapes_after_input_grad),
        accumulated_grads=in_own_stages(inventory.accumulated_grads),
    )


def find_discarded_sums(
    inventories: Mapping[int, WorkerInventory],
    usable: Mapping[int, WorkerInventory],
    dropped_micros: Mapping[int, Collection[int]],
    leaving_slots: Collection[int] = (),
) -> set[PartialSumKey]:
    """The sums that are not valid and are discarded as a whole, because the parts of a sum cannot be separated.

    A sum is discarded if it contains a micro-batch that was dropped since, or one twice. It is also discarded if it
    shares a micro-batch with another usable sum: a worker ran a stage, then others recomputed its part, and now it runs
    the stage again. Of overlapping sums the largest is kept.
    """
    discarded = {
        (key.step, key.segment, slot)
        for slot, inventory in inventories.items()
        for key in inventory.accumulated_grads
        if key.micro in dropped_micros.get(key.step, ())
    }
    micros_by_sum: dict[PartialSumKey, list[int]] = {}
    for slot, inventory in usable.items():
        for key in inventory.accumulated_grads:
            micros_by_sum.setdefault((key.step, key.segment, slot), []).append(key.micro)
    counted_micros: dict[tuple[int, int], set[int]] = {}
    for sum_key in sorted(
        micros_by_sum.keys() - discarded,
        key=lambda sum_key: (-len(micros_by_sum[sum_key]), sum_key[2] in leaving_slots, sum_key),
    ):
        counted, micros = counted_micros.setdefault(sum_key[:2], set()), set(micros_by_sum[sum_key])
        if counted.isdisjoint(micros) and len(micros) == len(micros_by_sum[sum_key]):
            counted |= micros
        else:
            discarded.add(sum_key)
    return discarded


def _without_sums(inventory: WorkerInventory, slot: int, discarded: Collection[PartialSumKey]) -> WorkerInventory:
    kept = tuple(key for key in inventory.accumulated_grads if (key.step, key.segment, slot) not in discarded)
    return msgspec.structs.replace(inventory, accumulated_grads=kept)


def _contributors_by_segment(
    step: int,
    inventories: Mapping[int, WorkerInventory],
    task_lists: Sequence[Sequence[StepTask]],
    problem: RecoveryProblem,
) -> tuple[tuple[int, ...], ...]:
    """By segment: the runners whose sums contribute. A runner without a contribution receives the result: it may never
    have run a forward there, and so does not know the layers' buffer updates. If no runner contributes, the first does
    for all."""
    contributors = {
        (slot, key.segment)
        for slot, inventory in inventories.items()
        for key in inventory.accumulated_grads
        if key.step == step
    }
    contributors |= {
        (slot, task.action.segment)
        for slot, row in enumerate(task_lists)
        for task in row
        if task.step == step and task.action.kind in (Kind.W, Kind.B) and not task.output_only
    }
    contributors_by_segment = []
    for g in range(problem.segments):
        runners = problem.runners[g % problem.stages]
        contributors_by_segment.append(tuple(slot for slot in runners if (slot, g) in contributors) or (runners[0],))
    return tuple(contributors_by_segment)


def _holders_not_running(inventories: Mapping[int, WorkerInventory], stage: int, runners: Collection[int]) -> list[int]:
    """The holders of a stage that do not run it."""
    return [
        slot for slot, inventory in inventories.items() if stage in inventory.weight_versions and slot not in runners
    ]


def _keepers_of_inputs(
    task_lists: Sequence[Sequence[StepTask]], missing: MissingWork, problem: RecoveryProblem
) -> dict[str, tuple[int, ...]]:
    """Holders of the inputs that no task produces, by step and tensor name."""
    produced = {(task.step, produced_tensor(task.action)) for row in task_lists for task in row}
    keepers: dict[str, tuple[int, ...]] = {}
    for task in (task for row in task_lists for task in row):
        required = required_tensor(task.action, problem.segments)
        if required is not None and (task.step, required) not in produced:
            key = WorkKey(task.step, required.segment, required.micro or 0)
            keepers[f"{task.step} {required}"] = (missing.outputs if required.kind is Kind.F else missing.input_grads)[
                key
            ]
    return keepers


def produced_tensor(action: Action) -> Action | None:
    """The name of an action's output; the gradient is named I, whether I or B computes it. None for W, R and S."""
    segment, kind, micro = action
    if kind is Kind.F:
        return action
    return Action(segment, Kind.I, micro) if kind in INPUT_GRAD_KINDS else None


def required_tensor(action: Action, segments: int) -> Action | None:
    """The name of the input that an action takes from another segment."""
    segment, kind, micro = action
    if kind is Kind.F:
        return Action(segment - 1, Kind.F, micro) if segment else None
    return Action(segment + 1, Kind.I, micro) if kind in INPUT_GRAD_KINDS and segment + 1 < segments else None


def _count_redone(
    task_lists: Sequence[Sequence[StepTask]],
    inventories: Mapping[int, WorkerInventory],
    leaving_slots: Collection[int] = (),
) -> int:
    """Actions that had been finished before, as far as survivors know: those of which only the output is needed, those
    whose output was used, and those of leaving workers that have no time to finish them."""
    leaving = [inventories[slot] for slot in leaving_slots if slot in inventories]
    forwards = {
        key for inventory in leaving for key in (*inventory.tapes_after_forward, *inventory.tapes_after_input_grad)
    }
    backwards: set[WorkKey] = set()
    for inventory in inventories.values():
        for key in (*inventory.tapes_after_forward, *inventory.tapes_after_input_grad, *inventory.accumulated_grads):
            forwards.add(key._replace(segment=key.segment - 1))
        for key in (*inventory.tapes_after_input_grad, *inventory.accumulated_grads):
            backwards.add(key._replace(segment=key.segment + 1))
        backwards.update(key._replace(segment=key.segment + 1) for key in inventory.input_grads)
    count = 0
    for task in (task for row in task_lists for task in row):
        key = WorkKey(task.step, task.action.segment, task.action.micro or 0)
        used = key in backwards or (task.action.kind is Kind.F and key in forwards)
        count += task.output_only or (task.action.kind is not Kind.W and used)
    return count
