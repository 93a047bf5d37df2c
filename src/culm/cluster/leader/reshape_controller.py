"""Reshape controller: decides by cost whether the present nodes should run in another shape, lets the open steps drain
and then starts an epoch with the new shape and the same training state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.leader.events import DecideReshape, ReshapeVerdict
from culm.cluster.leader.plan_improver import PlanImprover
from culm.cluster.leader.reshaped_epoch import (
    ReshapeInputs,
    any_weights_after,
    initial_shape,
    layer_model_of,
    reshaped_epoch,
)
from culm.errors import PlanError
from culm.plan.replan.plan_case import Slot
from culm.plan.reshape.pipeline_shape import (
    Depths,
    PipelineShape,
    ShapeInputs,
    best_depths,
    build_shape,
    format_depths,
    largest_memory_need,
    parse_depths,
    predict_shape_step_s,
    slots_to_fill,
)
from culm.plan.reshape.reconfigure_policy import PipelineLayout, ReconfigureDecision, ReconfigureKind, ReconfigureState
from culm.plan.reshape.reshape_decision import (
    RESHAPE_DELAY_STEPS,
    RunSpeed,
    SettleTimer,
    ShapeLimits,
    decide_reshape,
    estimate_reshape_costs,
    reshape_options,
)
from culm.runtime import messages
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.leader.leader_state import Flow, LeaderState
    from culm.cluster.leader.next_epoch import NextEpoch
    from culm.cluster.leader.recovery_metrics import EpochHalt


@dataclass(frozen=True)
class ReshapeIntent:
    """A planned change of shape, before the first step that no worker has begun."""

    depths: Depths
    why: str
    first_step: int
    requested: bool = False
    """Whether it was requested from outside."""
    shape: PipelineShape | None = None
    """The current shape with another plan; None: the shape is built from the depths."""


class ReshapeController:
    """Keeps the planned change until the open steps have drained. A loss, a notice or a new leader cancels it."""

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self.intent: ReshapeIntent | None = None
        self._requested_depths: Depths | None = None
        self._smaller_stages: ReshapeVerdict | None = None
        """The shape to change to because the memory of a worker does not suffice."""
        self._quiet_period = SettleTimer()
        self.plan_improver = PlanImprover(state)
        self._model: ShapeInputs | None = None
        self._step_times: dict[Depths, float] = {}

    # Requests and plans.

    def request_layout(self, text: str) -> None:
        """Record a layout requested from outside. An invalid one is refused with an event."""
        try:
            self._requested_depths = parse_depths(text)
        except PlanError as error:
            self.state.log_event("refused", why=f"cannot use the requested layout {text!r}: {error}")

    def consider_reshape(self, step: int) -> Flow[None]:
        """Before a step is committed: if another shape is wanted, announce the drain. No worker has begun the step
        after the next yet, so none will begin it in the old shape."""
        state = self.state
        if (
            self.intent is not None
            or state.epoch is None
            or step + RESHAPE_DELAY_STEPS >= state.setup.steps
            or not self._is_supported
        ):
            return
        requested = self._requested_reshape()
        wanted = requested or (yield from self._policy_reshape(step))
        first_step = step + RESHAPE_DELAY_STEPS
        if wanted is not None:
            self.intent = ReshapeIntent(*wanted, first_step=first_step, requested=requested is not None)
        else:
            self.intent = self._better_plan(state.epoch, first_step)
        if self.intent is None:
            return
        state.broadcast(messages.Drain(state.epoch_number, self.intent.first_step))
        step, layout, why = self.intent.first_step, format_depths(self.intent.depths), self.intent.why
        state.log_event("drain", step=step, layout=layout, why=why)
        state.put_key("shape", msgspec.msgpack.encode({"step": step, "layout": layout, "why": why}))  # for the launcher

    def _better_plan(self, epoch: Epoch, first_step: int) -> ReshapeIntent | None:
        """The current shape with a better plan, if one was found and every slot is filled."""
        if self.state.members.has_empty_slot(epoch) or self.state.members.leave_deadlines:
            return None
        shape = _current_shape(epoch, self.state)
        better = self.plan_improver.improved_shape(shape, self.state.setup.steps - first_step)
        if better is None:
            return None
        self.state.log_event("plan_improved", step=first_step, gain=better.gain, why=better.why)
        return ReshapeIntent(shape.depths, better.why, first_step, shape=better.shape)

    @property
    def _is_supported(self) -> bool:
        """Whether the strategy allows another shape, and the costs of the layers are known."""
        return self.state.setup.strategy_object.reshapes and bool(self.state.setup.layers)

    @property
    def is_due(self) -> bool:
        """Whether the open steps have drained: everything before the first step of the new shape is committed."""
        return self.intent is not None and self.state.ledger.next_step >= self.intent.first_step

    def _requested_reshape(self) -> tuple[Depths, str] | None:
        """The requested layout and the reason; None if there is no request, or it is current or impossible."""
        depths, self._requested_depths = self._requested_depths, None
        assert self.state.epoch is not None
        if depths is None or depths == _current_depths(self.state.epoch, self.state):
            return None
        try:
            build_shape(self.model, depths)
            available = len(self._available_workers(self.state.epoch))
            if sum(depths) > available:
                raise PlanError(f"it needs {sum(depths)} nodes and {available} are present")
        except PlanError as error:
            self.state.log_event("refused", why=f"cannot use the requested layout {format_depths(depths)}: {error}")
            return None
        return depths, f"{format_depths(depths)} was requested"

    # The policy.

    @property
    def model(self) -> ShapeInputs:
        if self._model is None:
            self._model = layer_model_of(self.state.initial_setup)
        return self._model

    def _policy_reshape(self, step: int) -> Flow[tuple[Depths, str] | None]:
        """The layout that the policy chooses and the reason; None: the shape stays. It is asked if a slot is empty or
        a node has no slot, and membership has been stable since."""
        state, epoch = self.state, self.state.epoch
        assert epoch is not None
        self._quiet_period.observe((frozenset(self._available_workers(epoch)), epoch.shape_epoch), step, state.now)
        at_odds = state.members.has_empty_slot(epoch) or state.members.waiting_members(epoch)
        follows = {member.worker for member in epoch.present_members} - state.members.required_workers
        busy = follows or state.members.leave_deadlines or not state.recovery_metrics.epoch_step_s
        if not self._quiet_period.is_due(step, state.now) or not at_odds or busy:
            return None
        self._quiet_period.is_decided = True
        if state.setup.reconfigure == "never":
            return None
        verdict: ReshapeVerdict | None = yield DecideReshape()
        if verdict is None:
            return None
        state.log_event("decision", verdict=verdict.kind, layout=verdict.layout, why=verdict.why)
        return None if verdict.depths is None else (verdict.depths, verdict.why)

    def apply_policy(self) -> ReshapeVerdict | None:
        """The decision of the policy. It plans every possible layout, which may take long: call it in a thread."""
        assert self.state.epoch is not None
        decided = self._apply_policy(self.state.epoch, self.state.now)
        if decided is None:
            return None
        decision, why = decided
        depths = _sorted_depths(decision.layout) if decision.changes_shape else None
        return ReshapeVerdict(decision.kind, str(decision.layout), depths, why)

    def _apply_policy(self, epoch: Epoch, now: float) -> tuple[ReconfigureDecision, str] | None:
        setup = self.state.setup
        policy_state = self._policy_state(epoch)
        among = self._possible_layouts(policy_state)
        ahead = estimate_reshape_costs(policy_state, among, self._pace_estimate(epoch, now), self._step_time, now)
        return decide_reshape(setup.strategy_object.reshape_policy(setup.reconfigure), policy_state, among, ahead, now)

    def _policy_state(self, epoch: Epoch) -> ReconfigureState:
        """The state of the run as the policy's input."""
        full, depths = Plan.from_text(self.state.setup.plan), _current_depths(epoch, self.state)
        slots: dict[Slot, str] = {}
        for pipeline in range(full.pipelines):
            own = [slot for slot in slots_to_fill(full) if slot // full.stages == pipeline]
            members = [epoch.members[slot] for slot in own]
            slots |= {Slot(pipeline, i): str(m.worker) for i, m in enumerate(members) if m is not None}
        zones, available = self.state.members.zones, self._available_workers(epoch)
        return ReconfigureState(
            zone_by_node={str(worker): zones.get(member.node, "") for worker, member in available.items()},
            node_by_slot=slots,
            depths=depths,
            max_pipelines=self.model.micro_batches,
            machine_by_node={str(worker): str(member.node) for worker, member in available.items()}
            if self.state.setup.workers_per_node > 1
            else {},
        )

    def _possible_layouts(self, policy_state: ReconfigureState) -> Mapping[PipelineLayout, ReconfigureKind]:
        """The layouts that the nodes allow; under `templates` there is exactly one for each number of nodes."""
        if self.state.setup.strategy_object.rebuilds_pipelines:
            kinds: dict[PipelineLayout, ReconfigureKind] = {policy_state.layout: "stay"}
            kinds.setdefault(PipelineLayout(best_depths(self.model, len(policy_state.zone_by_node))), "uneven")
            return kinds
        return reshape_options(policy_state, self._shape_limits)

    @property
    def _shape_limits(self) -> ShapeLimits:
        model = self.model
        return ShapeLimits(
            min_depth=model.min_depth,
            max_depth=model.max_depth,
            equal_depths=model.ranges > 1,
            allows_one_pipeline=self.state.setup.strategy_object.allows_one_pipeline,
        )

    def _pace_estimate(self, epoch: Epoch, now: float) -> RunSpeed:
        state, metrics = self.state, self.state.recovery_metrics
        return RunSpeed(
            measured_step_s=metrics.epoch_step_s,
            predicted_step_s=predict_shape_step_s(self.model, _current_shape(epoch, state), Plan.from_text(epoch.plan)),
            remaining_s=(state.setup.steps - state.ledger.next_step) * metrics.epoch_step_s,
            time_between_losses_s=(now - state.started_at) / len(state.members.departed_nodes)
            if state.members.departed_nodes
            else math.inf,
            state_bytes=sum(layer.resident_bytes for layer in self.model.layers),
            measured_reshape_s=metrics.reshape_s,
        )

    def _step_time(self, layout: PipelineLayout) -> float:
        depths = _sorted_depths(layout)
        if depths not in self._step_times:
            self._step_times[depths] = predict_shape_step_s(self.model, build_shape(self.model, depths))
        return self._step_times[depths]

    # Too little memory.

    def find_smaller_stages(self) -> ReshapeVerdict | None:
        """The fastest shape of the present nodes in which the stage that needs most memory needs less than now; None:
        there is none. It plans every possible layout, which may take long: call it in a thread."""
        epoch, layers = self.state.epoch, self.model.layers
        if epoch is None or not self._is_supported:
            return None
        policy_state = self._policy_state(epoch)
        limit = largest_memory_need(_current_shape(epoch, self.state), layers)
        smaller = [
            layout
            for layout in reshape_options(policy_state, replace(self._shape_limits, allows_one_pipeline=True))
            if sum(layout.depths) <= len(policy_state.zone_by_node)
            and largest_memory_need(build_shape(self.model, _sorted_depths(layout)), layers) < limit
        ]
        if not smaller:
            return None
        chosen = min(smaller, key=self._step_time)
        why = f"{chosen} has stages that need less memory"
        return ReshapeVerdict("shrink", str(chosen), _sorted_depths(chosen), why)

    def request_smaller_stages(self, verdict: ReshapeVerdict) -> None:
        """Change to this shape as soon as the open steps allow it."""
        self._smaller_stages = verdict

    def reshape_for_memory(self, halt: EpochHalt, old: Epoch) -> NextEpoch | None:
        """The epoch with smaller stages, if they are needed and no worker has updated its weights in an open step,
        which is run again. None: continue in the current shape."""
        verdict, inputs = self._smaller_stages, self._reshape_inputs(halt, old)
        if verdict is None or verdict.depths is None or inputs.layers_without_holder:
            return None
        if any_weights_after(halt.inventories, inputs.step):
            return None
        self._smaller_stages = None
        self._take_intent()
        return self._reshape_or_refuse(inputs, verdict.depths, verdict.why)

    def complete_before_smaller_stages(self, next_epoch: NextEpoch) -> NextEpoch:
        """If smaller stages are needed and some worker has updated its weights in the open step: complete it, begin no
        other step, and change the shape then."""
        verdict, self._smaller_stages = self._smaller_stages, None
        if verdict is None or verdict.depths is None:
            return next_epoch
        start = next_epoch.epoch.start
        self.intent = ReshapeIntent(verdict.depths, verdict.why, start)
        return replace(next_epoch, epoch=msgspec.structs.replace(next_epoch.epoch, stop_before=start))

    # The change.

    def _available_workers(self, epoch: Epoch) -> dict[int, Member]:
        """All workers that could have a slot, by number: present and not leaving, or waiting."""
        members = self.state.members
        staying = [member for member in members.present_members(epoch) if member.node not in members.leave_deadlines]
        return {member.worker: member for member in (*staying, *members.waiting_members(epoch))}

    def reshape_if_due(self, halt: EpochHalt, old: Epoch) -> NextEpoch | None:
        """The epoch with another shape if a change is due: it was planned and no step is open, or a node was lost under
        `templates`. None: continue in the current shape."""
        intent, reshape_inputs = self._take_intent(), self._reshape_inputs(halt, old)
        if reshape_inputs.layers_without_holder or not self._is_supported:
            return None
        if halt.lost_nodes:
            return (
                self._apply_template(reshape_inputs)
                if reshape_inputs.setup.strategy_object.rebuilds_pipelines
                else None
            )
        if (
            intent is None
            or intent.first_step > reshape_inputs.step
            or any_weights_after(halt.inventories, reshape_inputs.step)
        ):
            return None
        self._requested_depths, self._quiet_period.is_decided = None, True
        return self._reshape_or_refuse(reshape_inputs, intent.depths, intent.why, intent.shape)

    def _take_intent(self) -> ReshapeIntent | None:
        """Take the planned change. If it is not carried out now, it has to be decided again."""
        intent, self.intent = self.intent, None
        if intent is not None:
            self._requested_depths, self._quiet_period.is_decided = (
                intent.depths if intent.requested else self._requested_depths,
                False,
            )
        return intent

    def reshape_from_layers(self, halt: EpochHalt, old: Epoch) -> NextEpoch | None:
        """Recover from a half-finished change of shape: some stage has no holder, but every layer has. None: a layer
        has none either."""
        self._take_intent()
        reshape_inputs = self._reshape_inputs(halt, old)
        return (
            None
            if reshape_inputs.layers_without_holder or not self._is_supported
            else self._apply_template(reshape_inputs)
        )

    def _reshape_inputs(self, halt: EpochHalt, old: Epoch) -> ReshapeInputs:
        state = self.state
        return ReshapeInputs(
            setup=state.initial_setup,
            old_epoch=old,
            epoch_number=halt.next_number,
            leader=state.address,
            workers=self._available_workers(old),
            inventories=halt.inventories,
            step=state.ledger.next_step,
            zones=state.members.zones,
        )

    def _apply_template(self, reshape_inputs: ReshapeInputs) -> NextEpoch | None:
        """The epoch with the template for the remaining nodes; the open step is discarded and run again."""
        try:
            depths = best_depths(self.model, len(reshape_inputs.workers))
        except PlanError as error:
            self.state.log_event("refused", why=f"no template: {error}")
            return None
        nodes = len({member.node for member in reshape_inputs.workers.values()})
        why = f"{format_depths(depths)} is built from the {nodes} present nodes; the open step is run again"
        return self._reshape_or_refuse(reshape_inputs, depths, why)

    def _reshape_or_refuse(
        self, reshape_inputs: ReshapeInputs, depths: Depths, why: str, shape: PipelineShape | None = None
    ) -> NextEpoch | None:
        try:
            return reshaped_epoch(reshape_inputs, depths, why, shape)
        except PlanError as error:
            self.state.log_event("refused", why=f"the layout {format_depths(depths)}: {error}")
            return None

    def complete_open_step_first(self, next_epoch: NextEpoch) -> NextEpoch:
        """Some worker has already updated its weights in the open step, so that step must be completed: apply the
        template after it, and begin no other step before."""
        start, why = next_epoch.epoch.start, "pipelines are rebuilt from the remaining nodes"
        try:
            self.intent = ReshapeIntent(best_depths(self.model, len(next_epoch.epoch.present_members)), why, start)
        except PlanError as error:
            self.state.log_event("refused", why=f"no template: {error}")
            return next_epoch
        return replace(next_epoch, epoch=msgspec.structs.replace(next_epoch.epoch, stop_before=start))


def _current_depths(epoch: Epoch, state: LeaderState) -> Depths:
    return _current_shape(epoch, state).depths


def _current_shape(epoch: Epoch, state: LeaderState) -> PipelineShape:
    return epoch.shape or initial_shape(state.initial_setup)


def _sorted_depths(layout: PipelineLayout) -> Depths:
    return tuple(sorted(layout.depths, reverse=True))
