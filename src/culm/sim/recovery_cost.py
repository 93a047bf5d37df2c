"""Delay of the step that a loss interrupts, computed by the functions that recover real runs.

`role_assignment` says which workers run which stages after the loss, `lineage` which finished work is missing, and
`place_work` how soon the survivors have run it again. Here they get the inventories that survivors would report at a
moment of the planned step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from culm.plan.recover.lineage import WorkerInventory, WorkKey
from culm.plan.recover.recovery_plan import RecoveryProblem, plan_recovery, required_tensor
from culm.plan.recover.role_assignment import (
    RecoveryPolicy,
    SurvivingCluster,
    assign_roles,
    stages_without_holder,
)
from culm.schedule import Action, Costs, Kind, Plan, time_plan
from culm.schedule.action import INPUT_GRAD_KINDS, WEIGHT_GRAD_KINDS

if TYPE_CHECKING:
    from culm.plan import Slot
    from culm.schedule.plan_timing import Timeline
    from culm.sim.step_times import StepTimes
    from culm.strategies.strategy import Strategy

MAX_EXACT_FORWARDS = 100
"""Steps of up to this many forwards are examined in detail: every sixteenth of a step, every stage."""
MAX_PLANNED_FORWARDS = 600
"""Steps with more forwards are estimated by a formula."""
MAX_PIPELINES = 8
"""More pipelines are treated as this many, with less work for each."""


class RecoveryCost:
    """Seconds that a loss adds to the open step of one workload. Each situation is computed once."""

    def __init__(self, step_times: StepTimes) -> None:
        self._step_times = step_times
        self._delay_of_one_cached = cache(self._delay_of_one)

    @property
    def _forwards(self) -> int:
        return self._step_times.workload.stages * self._step_times.workload.micro_batches

    def recovery_s(self, strategy: Strategy, pipelines: int, lost_slots: Sequence[Slot], phase: float) -> float:
        """The delay if these slots become empty when `phase` of the step, from 0 to 1, is done. All other slots are
        filled.

        Losses of one stage are recovered one after the other, those of different stages at the same time. In large
        steps stand-ins are assumed to have run forwards ahead.
        """
        exact = self._forwards <= MAX_EXACT_FORWARDS
        eager = strategy.eager_forwards if exact else strategy.prefers_stand_ins
        parts = 16 if exact else 2
        part = min(parts - 1, int(phase * parts))
        lost = [slot.stage for slot in lost_slots]
        few = min(pipelines, MAX_PIPELINES)
        scale = few * (few - 1) / (pipelines * (pipelines - 1)) if pipelines > few else 1.0
        each = [
            lost.count(s)
            * self._delay_of_one_cached(strategy, eager, few, self._representative_stage(s), (part + 0.5) / parts)
            for s in set(lost)
        ]
        return scale * max(each, default=0.0)

    def _representative_stage(self, stage: int) -> int:
        """The stage to examine: in large steps, and beyond the planned depth, one in the middle stands for all."""
        w = self._step_times.workload
        return stage if self._forwards <= MAX_EXACT_FORWARDS and stage < w.stages else w.stages // 2

    def _delay_of_one(self, policy: RecoveryPolicy, eager: bool, pipelines: int, stage: int, phase: float) -> float:
        w = self._step_times.workload
        if pipelines == 1 and (w.stages == 1 or not policy.prefers_stand_ins):
            return 0.0
        if self._forwards > MAX_PLANNED_FORWARDS:
            return self._estimate_delay(policy, pipelines, phase)
        plan = self._step_times.plan(pipelines, max(pipelines, w.micro_batches))
        slot = (pipelines - 1) * w.stages + stage
        return max(0.0, step_delay(plan, w.costs, {slot}, phase, policy, eager_forwards=eager))

    def _estimate_delay(self, policy: RecoveryPolicy, pipelines: int, phase: float) -> float:
        """Time for the holders of the same layers to run what the lost worker had done; or all its work of the step,
        as far as that does not fit into their bubbles."""
        w = self._step_times.workload
        work = w.micro_batches / pipelines * w.stage_s
        bubble = max(0.0, self._step_times.healthy(pipelines) - work)
        helpers = pipelines if policy.prefers_stand_ins else pipelines - 1
        return max(phase * work / helpers, work / helpers - bubble)


def step_delay(
    plan: Plan,
    costs: Costs,
    lost_slots: Collection[int],
    phase: float,
    policy: RecoveryPolicy,
    *,
    eager_forwards: bool = False,
) -> float:
    """How much later than planned the step is complete if these slots become empty when `phase` of it is done.

    Infinite where a stage has no holder left. Negative where survivors finish earlier: a recovery may split the
    backward and share work in ways that the plan does not.
    """
    timeline = time_plan(plan, costs)
    at = phase * timeline.makespan
    inventories = surviving_state(timeline, at, lost_slots, policy, eager_forwards=eager_forwards)
    held = {slot: frozenset(inventory.weight_versions) for slot, inventory in inventories.items()}
    cluster = SurvivingCluster(full_plan=plan, policy=policy, held_stages=held, costs=costs)
    if stages_without_holder(cluster):
        return float("inf")
    layout = assign_roles(cluster)
    problem = RecoveryProblem(
        stages=plan.stages,
        segments=plan.segments,
        slot_count=len(plan.workers),
        micro_batches=plan.micro_batches,
        runners=layout.runners,
        first_open_step=0,
        split=any(action.kind is Kind.W for row in layout.plan.workers for action in row),
        costs=costs,
        default_runners=layout.default_runners,
    )
    recovery = plan_recovery(problem, inventories)
    # If no worker has started the step, it runs as a whole by the new plan.
    takes = recovery.makespan if recovery.steps else time_plan(layout.plan, costs).makespan
    return takes - (timeline.makespan - at)


@dataclass
class _SurvivorState:
    """What a surviving worker holds of the step."""

    tapes: set[WorkKey] = field(default_factory=set)
    input_gradients_done: set[WorkKey] = field(default_factory=set)
    weight_gradients_done: set[WorkKey] = field(default_factory=set)
    outputs: set[WorkKey] = field(default_factory=set)
    gradients: set[WorkKey] = field(default_factory=set)

    def record_action(self, action: Action) -> None:
        cell = _action_cell(action)
        if action.kind is Kind.F:
            self.tapes.add(cell)
            self.outputs.add(cell)
            return
        self.tapes.discard(cell)
        self.input_gradients_done.discard(cell)
        if action.kind in INPUT_GRAD_KINDS:
            self.gradients.add(cell)
        (self.weight_gradients_done if action.kind in WEIGHT_GRAD_KINDS else self.input_gradients_done).add(cell)

    def to_inventory(self, versions: Mapping[int, int]) -> WorkerInventory:
        return WorkerInventory(
            weight_versions=dict(versions),
            tapes_after_forward=tuple(sorted(self.tapes)),
            tapes_after_input_grad=tuple(sorted(self.input_gradients_done)),
            accumulated_grads=tuple(sorted(self.weight_gradients_done)),
            outputs=tuple(sorted(self.outputs)),
            input_grads=tuple(sorted(self.gradients)),
        )


def surviving_state(
    timeline: Timeline, at: float, lost_slots: Collection[int], policy: RecoveryPolicy, *, eager_forwards: bool = False
) -> dict[int, WorkerInventory]:
    """By slot: what its worker holds when all workers have stopped. Actions that were started are completed first.

    Tensors that the lost workers had sent have arrived; what they were computing is lost.
    """
    plan = timeline.plan
    holds: dict[int, dict[int, int]] = {slot: {slot % plan.stages: 0} for slot in range(len(plan.workers))}
    for replica in policy.initial_shadows(plan):
        holds[replica.slot][replica.stage] = 0
    states = {slot: _SurvivorState() for slot in holds if slot not in lost_slots}
    for slot, state in states.items():
        for action in _started_actions(timeline, slot, at):
            state.record_action(action)
    for slot in lost_slots:
        _add_received_tensors(timeline, slot, at, states)
    if eager_forwards:
        _add_eager_forwards(timeline, at, states)
    return {slot: state.to_inventory(holds[slot]) for slot, state in states.items()}


def _started_actions(timeline: Timeline, slot: int, at: float) -> Iterator[Action]:
    return (span.action for span in timeline.spans[slot] if span.start < at and span.action.micro is not None)


def _add_received_tensors(timeline: Timeline, lost: int, at: float, states: Mapping[int, _SurvivorState]) -> None:
    """Add tensors that a lost worker sent and that were not used yet to the workers that will use them."""
    plan = timeline.plan
    sent = {
        _sent_tensor(span.action) for span in timeline.spans[lost] if span.end <= at and span.action.micro is not None
    }
    for slot, state in states.items():
        used = {required_tensor(action, plan.segments) for action in _started_actions(timeline, slot, at)}
        for action in plan.workers[slot]:
            needs = required_tensor(action, plan.segments) if action.micro is not None else None
            if needs is not None and needs in sent and needs not in used:
                (state.outputs if needs.kind is Kind.F else state.gradients).add(_action_cell(needs))


def _sent_tensor(action: Action) -> Action:
    """The action that names a sent tensor: gradients are named by I, whether I or B computed them."""
    return action._replace(kind=Kind.I) if action.kind in INPUT_GRAD_KINDS else action


def _add_eager_forwards(timeline: Timeline, at: float, states: Mapping[int, _SurvivorState]) -> None:
    """Add the forwards that shadow replicas ran for their successor: as many as fit into the idle times so far."""
    P = timeline.plan.stages
    for slot, state in states.items():
        after = (slot % P + 1) % P
        idle = _idle_times(timeline, slot, at)
        forward = _forward_s(timeline, slot - slot % P + after)
        room = sum(int(seconds / forward) for seconds in idle) if forward > 0 else 0
        ready = sorted(cell for cell in state.outputs if cell.segment % P == slot % P and after)
        state.tapes |= {cell._replace(segment=after) for cell in ready[:room]}


def _idle_times(timeline: Timeline, slot: int, at: float) -> list[float]:
    spans = [span for span in timeline.spans[slot] if span.start < at]
    ends = [span.end for span in spans]
    starts = [*(span.start for span in spans[1:]), at]
    return [max(0.0, start - end) for start, end in zip(starts, ends, strict=True)] if spans else []


def _forward_s(timeline: Timeline, slot: int) -> float:
    return next((span.end - span.start for span in timeline.spans[slot] if span.action.kind is Kind.F), 0.0)


def _action_cell(action: Action) -> WorkKey:
    return WorkKey(0, action.segment, action.micro or 0)
