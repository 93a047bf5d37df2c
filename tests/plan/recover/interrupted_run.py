"""A run without tensors: workers run the lists of a plan in a random valid order, and then the run is interrupted.

What remains is what survivors would report, by the rules of a worker: an output stays with its producer until the step
commits, a frame that arrived and was not used stays too, a tape is freed with its W or with the step of its layers, and
a reduced sum is complete on some or all holders. Nothing is committed: at most two steps are open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import msgspec

from culm.plan.recover.lineage import WorkerInventory, WorkKey
from culm.plan.recover.recovery_plan import (
    RecoveryPlan,
    RecoveryProblem,
    RecoveryTransfers,
    plan_recovery,
    produced_tensor,
    required_tensor,
)
from culm.plan.recover.role_assignment import RoleAssignment, SurvivingCluster, assign_roles
from culm.plan.recover.task_dependencies import StepTask
from culm.schedule import Action, Kind, Plan
from culm.schedule.action import INPUT_GRAD_KINDS, WEIGHT_GRAD_KINDS
from culm.strategies import get


@dataclass
class SimulatedWorker:
    """The state of one worker."""

    slot: int
    position: int = 0
    step: int = 0
    weight_versions: dict[int, int] = field(default_factory=dict)
    tapes_after_forward: set[WorkKey] = field(default_factory=set)
    tapes_after_input_grad: set[WorkKey] = field(default_factory=set)
    accumulated_grads: set[WorkKey] = field(default_factory=set)
    outputs: set[WorkKey] = field(default_factory=set)
    input_grads: set[WorkKey] = field(default_factory=set)
    complete_sums: set[tuple[int, int]] = field(default_factory=set)
    started_reduces: set[tuple[int, int]] = field(default_factory=set)
    """(step, segment): R has started here."""

    def tensors_of(self, kind: Kind) -> set[WorkKey]:
        """The outputs of F or of I."""
        return self.outputs if kind is Kind.F else self.input_grads

    def inventory(self) -> WorkerInventory:
        waiting = {key for key in self.accumulated_grads if (key.step, key.segment) not in self.complete_sums}
        return WorkerInventory(
            weight_versions=dict(self.weight_versions),
            tapes_after_forward=tuple(sorted(self.tapes_after_forward)),
            tapes_after_input_grad=tuple(sorted(self.tapes_after_input_grad)),
            accumulated_grads=tuple(sorted(waiting)),
            outputs=tuple(sorted(self.outputs)),
            input_grads=tuple(sorted(self.input_grads)),
            complete_sums=tuple(sorted(self.complete_sums)),
        )


class InterruptedRun:
    """Two steps of a plan, run up to a random point."""

    def __init__(self, plan: Plan, rng: Random, *, shadows: bool = False) -> None:
        self.plan, self.rng, self.shadows = plan, rng, shadows
        self.workers = [
            SimulatedWorker(slot, weight_versions={slot % plan.stages: 0}) for slot in range(len(plan.workers))
        ]
        if shadows:
            for worker in self.workers:
                worker.weight_versions[(worker.slot + 1) % plan.stages] = 0

    def run_and_interrupt(self) -> dict[int, WorkerInventory]:
        """Run a random number of actions in random valid order; then stop all workers."""
        for _ in range(self.rng.randrange(2 * sum(map(len, self.plan.workers)) + 1)):
            able = [worker for worker in self.workers if self._can_run(worker)]
            if not able:
                break
            self._run_next(self.rng.choice(able))
        self._deliver_in_flight()
        return {worker.slot: worker.inventory() for worker in self.workers}

    def _next_action(self, worker: SimulatedWorker) -> Action | None:
        row = self.plan.workers[worker.slot]
        return row[worker.position] if worker.step < 2 and worker.position < len(row) else None

    def _can_run(self, worker: SimulatedWorker) -> bool:
        action = self._next_action(worker)
        if action is None:
            return False
        if action.kind is Kind.S:
            return self._all_reached_reduce(worker.step, action.segment)
        needs = required_tensor(action, self.plan.segments)
        return needs is None or self._exists_somewhere(_work_key(worker.step, needs), needs.kind)

    def _exists_somewhere(self, key: WorkKey, kind: Kind) -> bool:
        return any(key in each.tensors_of(kind) for each in self.workers)

    def _all_reached_reduce(self, step: int, segment: int) -> bool:
        return all((step, segment) in self.workers[slot].started_reduces for slot in self.plan.holders_of(segment))

    def _run_next(self, worker: SimulatedWorker) -> None:
        action = self._next_action(worker)
        assert action is not None
        key = _work_key(worker.step, action)
        worker.position += 1
        match action.kind:
            case Kind.F:
                worker.tapes_after_forward.add(key)
                worker.outputs.add(key)
            case Kind.R:
                worker.started_reduces.add(key[:2])
            case Kind.S:
                self._step(worker, action.segment)
            case kind:
                self._backward(worker, key, kind)
        if worker.position == len(self.plan.workers[worker.slot]):
            worker.position, worker.step = 0, worker.step + 1
        if self.shadows:
            self._update_shadow(worker)

    def _backward(self, worker: SimulatedWorker, key: WorkKey, kind: Kind) -> None:
        worker.tapes_after_forward.discard(key)
        worker.tapes_after_input_grad.discard(key)
        if kind is Kind.I:
            worker.tapes_after_input_grad.add(key)
        if kind in INPUT_GRAD_KINDS:
            worker.input_grads.add(key)
        if kind in WEIGHT_GRAD_KINDS:
            worker.accumulated_grads.add(key)

    def _step(self, worker: SimulatedWorker, segment: int) -> None:
        """S of a worker's last segment updates the weights of the stage; the complete sum stays."""
        worker.complete_sums.add((worker.step, segment))
        stage = segment % self.plan.stages
        own = range(stage, self.plan.segments, self.plan.stages)
        if all((worker.step, g) in worker.complete_sums for g in own):
            worker.weight_versions[stage] = worker.step + 1
            worker.tapes_after_forward = {
                c for c in worker.tapes_after_forward if c.step > worker.step or c.segment not in own
            }

    def _update_shadow(self, worker: SimulatedWorker) -> None:
        """In a bubble: apply the complete sum to the shadow, or run its forward if the input is here."""
        stage = (worker.slot + 1) % self.plan.stages
        own = range(stage, self.plan.segments, self.plan.stages)
        version = worker.weight_versions[stage]
        if self.rng.random() < 0.3 and all(self._all_reached_reduce(version, g) for g in own):
            worker.complete_sums |= {(version, g) for g in own}
            worker.weight_versions[stage] = version + 1
            worker.tapes_after_forward = {
                c for c in worker.tapes_after_forward if c.step > version or c.segment not in own
            }
        elif version == worker.step:
            ready = [c for g in own for c in self._available_forwards(worker, version, g) if c not in worker.outputs]
            if ready and self.rng.random() < 0.5:
                chosen = self.rng.choice(ready)
                worker.tapes_after_forward.add(chosen)
                worker.outputs.add(chosen)

    def _available_forwards(self, worker: SimulatedWorker, step: int, g: int) -> Iterable[WorkKey]:
        keys = (WorkKey(step, g, micro) for micro in self.plan.micros_of(worker.slot))
        return [key for key in keys if g == 0 or key._replace(segment=g - 1) in worker.outputs]

    def _deliver_in_flight(self) -> None:
        """Deliver a random part of what is in flight: sums that all holders have reached, and unused frames."""
        for worker in self.workers:
            for step, g in worker.started_reduces:
                if self._all_reached_reduce(step, g) and self.rng.random() < 0.5:
                    worker.complete_sums.add((step, g))
            for step, action in self._remaining_actions(worker):
                needs = required_tensor(action, self.plan.segments)
                if (
                    needs is None
                    or not self._exists_somewhere(_work_key(step, needs), needs.kind)
                    or self.rng.random() < 0.5
                ):
                    continue
                worker.tensors_of(needs.kind).add(_work_key(step, needs))

    def _remaining_actions(self, worker: SimulatedWorker) -> list[tuple[int, Action]]:
        row = self.plan.workers[worker.slot]
        return [(worker.step, action) for action in row[worker.position :]] if worker.step < 2 else []


def _work_key(step: int, action: Action) -> WorkKey:
    return WorkKey(step, action.segment, action.micro or 0)


def lose_random_workers(inventories: dict[int, WorkerInventory], plan: Plan, rng: Random) -> dict[int, WorkerInventory]:
    """Lose random workers so that each stage still has a holder."""
    left = dict(inventories)
    for slot in rng.sample(sorted(left), rng.randint(1, len(left) - 1)):
        rest = {other: inventory for other, inventory in left.items() if other != slot}
        if {stage for inventory in rest.values() for stage in inventory.weight_versions} == set(range(plan.stages)):
            left = rest
    return left


@dataclass
class RecoveredRun:
    """An interrupted run that lost workers: the survivors, their roles, and the recovery."""

    plan: Plan
    inventories: dict[int, WorkerInventory]
    roles: RoleAssignment
    problem: RecoveryProblem
    recovery: RecoveryPlan


def interrupt_and_recover(plan: Plan, rng: Random, strategy: str, *, notices: bool = False) -> RecoveredRun:
    """Interrupt, lose workers, assign roles, plan the recovery: what a leader does. With `notices` some survivors are
    leaving, and some kept tensors left earlier with other workers under notice: only their sums are still here."""
    survivors = lose_random_workers(
        InterruptedRun(plan, rng, shadows="shadow" in strategy).run_and_interrupt(), plan, rng
    )
    survivors = {slot: _forgetful(inventory, rng) for slot, inventory in survivors.items()} if notices else survivors
    leaving = (
        survivors.keys() - lose_random_workers(survivors, plan, rng).keys() if notices and len(survivors) > 1 else set()
    )
    held_stages = {
        slot: frozenset(inventory.weight_versions) for slot, inventory in survivors.items() if slot not in leaving
    }
    roles = assign_roles(SurvivingCluster(full_plan=plan, policy=get(strategy), held_stages=held_stages))
    problem = RecoveryProblem(
        stages=plan.stages,
        segments=plan.segments,
        slot_count=len(plan.workers),
        micro_batches=plan.micro_batches,
        runners=roles.runners,
        first_open_step=0,
        split=any(action.kind is Kind.W for row in roles.plan.workers for action in row),
        default_runners=roles.default_runners,
        leaving_slots=sorted(leaving),
        time_left=rng.choice((math.inf, 20.0, 0.0)),
    )
    return RecoveredRun(plan, survivors, roles, problem, plan_recovery(problem, survivors))


def _forgetful(inventory: WorkerInventory, rng: Random) -> WorkerInventory:
    """The same inventory without some of the kept tensors."""
    outputs, input_grads = (
        tuple(key for key in kept if rng.random() < 0.7) for kept in (inventory.outputs, inventory.input_grads)
    )
    return msgspec.structs.replace(inventory, outputs=outputs, input_grads=input_grads)


def replay_recovery(case: RecoveredRun) -> list[SimulatedWorker]:
    """Carry a recovery out, each worker in the order of its list, using only what it has and what others send. Raises
    AssertionError on a deadlock."""
    return _Replay(case).run()


class _Replay:
    def __init__(self, case: RecoveredRun) -> None:
        self.recovery, self.segments = case.recovery, case.plan.segments
        self.transfers = RecoveryTransfers(case.recovery, case.plan.segments)
        self.workers = [SimulatedWorker(slot) for slot in range(case.problem.slot_count)]
        for slot, inventory in case.inventories.items():
            worker = self.workers[slot]
            worker.outputs, worker.input_grads = set(inventory.outputs), set(inventory.input_grads)
            worker.tapes_after_forward, worker.tapes_after_input_grad = (
                set(inventory.tapes_after_forward),
                set(inventory.tapes_after_input_grad),
            )
        self.task_lists = {
            slot: sorted(self.recovery.tasks_of(slot), key=lambda task: task.step) for slot in case.inventories
        }
        self.sent_tensors = {
            (step, name, consumer)
            for slot in case.inventories
            for step in self.recovery.steps
            for name, consumers in self.transfers.tensors_to_resend(step, slot)
            for consumer in consumers
        }
        self.produced_tensors: set[tuple[int, Action]] = set()

    def run(self) -> list[SimulatedWorker]:
        while sum(self._run_ready_tasks(slot, row) for slot, row in self.task_lists.items()):
            pass
        stuck = {slot: str(row[0]) for slot, row in self.task_lists.items() if row}
        assert not stuck, f"no worker can continue: {stuck}"
        return self.workers

    def _run_ready_tasks(self, slot: int, row: list[StepTask]) -> bool:
        """Run a list as far as possible; returns whether any task was run."""
        left = len(row)
        while row and self._input_available(slot, row[0]):
            self._run_task(slot, row.pop(0))
        return len(row) < left

    def _input_available(self, slot: int, task: StepTask) -> bool:
        needs = required_tensor(task.action, self.segments)
        if needs is None:
            return True
        if self.transfers.source_of(task.step, needs, slot) != slot:
            return (task.step, str(needs), slot) in self.sent_tensors
        return _work_key(task.step, needs) in self.workers[slot].tensors_of(needs.kind)

    def _run_task(self, slot: int, task: StepTask) -> None:
        worker, produced = self.workers[slot], produced_tensor(task.action)
        key = _work_key(task.step, task.action)
        _check_tape(worker, key, task.action.kind, task.output_only)
        if task.action.kind in WEIGHT_GRAD_KINDS and not task.output_only:
            worker.accumulated_grads.add(key)
        if produced is not None:
            assert (task.step, produced) not in self.produced_tensors, (
                f"{produced} of step {task.step} is produced twice"
            )
            self.produced_tensors.add((task.step, produced))
            worker.tensors_of(produced.kind).add(key)
            self.sent_tensors |= {
                (task.step, str(produced), consumer) for consumer in self.transfers.consumers_of(task.step, produced)
            }


def _check_tape(worker: SimulatedWorker, key: WorkKey, kind: Kind, output_only: bool) -> None:
    """F leaves a tape, I and B need one, W needs the tape that I left."""
    match kind:
        case Kind.F:
            worker.tapes_after_forward.add(key)
        case Kind.W:
            assert key in worker.tapes_after_input_grad, f"W of {key} has no tape on slot {worker.slot}"
            worker.tapes_after_input_grad.discard(key)
        case _:
            assert key in worker.tapes_after_forward, f"{kind} of {key} has no tape on slot {worker.slot}"
            worker.tapes_after_forward.discard(key)
            if kind is Kind.I and not output_only:
                worker.tapes_after_input_grad.add(key)
