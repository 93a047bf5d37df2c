"""Reshape controller: decides by cost whether the present nodes should run in another shape, lets the open steps drain
and then starts an epoch with the new shape and the same training state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from culm.cluster.leader.events import (
    BuildShape,
    DecideReshape,
    PlannedEpoch,
    PlanReshape,
    ReshapeDecided,
    ReshapeVerdict,
    ShapeBuilt,
)
from culm.cluster.leader.next_epoch import NextEpoch
from culm.cluster.leader.plan_improver import PlanImprover
from culm.cluster.leader.policy_case import LayoutStepTimes, PolicyCase
from culm.cluster.leader.reshaped_epoch import ReshapeInputs, any_weights_after, initial_shape, layer_model_of
from culm.errors import PlanError
from culm.plan.replan.plan_case import Slot
from culm.plan.reshape.pipeline_shape import (
    Depths,
    PipelineShape,
    ShapeInputs,
    format_depths,
    parse_depths,
    slots_to_fill,
)
from culm.plan.reshape.reconfigure_policy import ReconfigureState
from culm.plan.reshape.reshape_decision import (
    RESHAPE_DELAY_STEPS,
    SettleTimer,
)
from culm.runtime import messages
from culm.runtime.epoch import Epoch, Member
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.cluster.leader.leader_state import Flow, LeaderState
    from culm.cluster.leader.recovery_metrics import EpochHalt


@dataclass(frozen=True)
class ReshapeIntent:
    """A planned change of shape, before the first step that no worker has begun."""

    depths: Depths | None
    """None: the template for the workers that are present then."""
    why: str
    first_step: int
    requested: bool = False
    """Whether it was requested from outside."""
    shape: PipelineShape | None = None
    """The shape, if it is known: the requested one, or the current one with another plan; None: it is built from the
    depths."""


class ReshapeController:
    """Keeps the planned change until the open steps have drained. A loss, a notice or a new leader cancels it."""

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self.intent: ReshapeIntent | None = None
        self._requested_depths: Depths | None = None
        """The layout requested last from outside, until its shape has been built."""
        self._requested_shape: PipelineShape | None = None
        """Its shape, until the change begins or is refused."""
        self._smaller_stages: ReshapeVerdict | None = None
        """The shape to change to because the memory of a worker does not suffice."""
        self._quiet_period = SettleTimer()
        self.plan_improver = PlanImprover(state)
        self._step_times: LayoutStepTimes | None = None
        self._asked: tuple[frozenset[int], int] | None = None
        """The workers and the epoch that the policy was asked about last."""
        self._verdict: ReshapeVerdict | None = None
        """What it has decided about them, until the next commit."""

    # Requests and plans.

    def request_layout(self, text: str) -> None:
        """Take a layout requested from outside, and have its shape built while training continues. An invalid one is
        refused with an event."""
        try:
            depths = parse_depths(text)
        except PlanError as error:
            self.state.log_event("refused", why=f"cannot use the requested layout {text!r}: {error}")
            return
        if self._is_supported:
            self._requested_depths, self._requested_shape = depths, None
            self.state.emit(BuildShape(depths))

    def handle_requested_shape(self, event: ShapeBuilt) -> None:
        """Keep the shape of the requested layout until the next commit, or refuse the layout, which is impossible."""
        if event.depths != self._requested_depths:
            return  # another layout has been requested since
        self._requested_depths, self._requested_shape = None, event.shape
        if event.shape is None:
            self._refuse_request(event.depths, event.why)

    def _refuse_request(self, depths: Depths, why: str) -> None:
        self.state.log_event("refused", why=f"cannot use the requested layout {format_depths(depths)}: {why}")

    def consider_reshape(self, step: int) -> None:
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
        first_step = step + RESHAPE_DELAY_STEPS
        if (shape := self._requested_reshape(state.epoch)) is not None:
            why = f"{format_depths(shape.depths)} was requested"
            self._announce(ReshapeIntent(shape.depths, why, first_step, requested=True, shape=shape), shape.depths)
        elif (wanted := self._policy_reshape(state.epoch, step)) is not None:
            depths, why = wanted
            self._announce(ReshapeIntent(depths, why, first_step), depths)
        elif (better := self._better_plan(state.epoch, first_step)) is not None:
            self._announce(better, _current_depths(state.epoch, state))

    def _announce(self, intent: ReshapeIntent, depths: Depths) -> None:
        state, step, layout, why = self.state, intent.first_step, format_depths(depths), intent.why
        self.intent = intent
        state.broadcast(messages.Drain(state.epoch_number, step))
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

    def _requested_reshape(self, epoch: Epoch) -> PipelineShape | None:
        """The requested shape; None: there is none, or it is the current one, or too few nodes are present."""
        shape, self._requested_shape = self._requested_shape, None
        if shape is None or shape.depths == _current_depths(epoch, self.state):
            return None
        needed, available = sum(shape.depths), len(self._available_workers(epoch))
        if needed > available:
            self._refuse_request(shape.depths, f"it needs {needed} nodes and {available} are present")
            return None
        return shape

    # The policy.

    @property
    def model(self) -> ShapeInputs:
        return self._known_step_times.model

    @property
    def _known_step_times(self) -> LayoutStepTimes:
        if self._step_times is None:
            self._step_times = LayoutStepTimes(layer_model_of(self.state.initial_setup))
        return self._step_times

    def _policy_reshape(self, epoch: Epoch, step: int) -> tuple[Depths, str] | None:
        """The layout that the policy has chosen and the reason; None: the shape stays. It is asked if a slot is empty
        or a node has no slot, and membership has been stable since. Its answer is used at a later commit, if the
        workers are still the same."""
        state, verdict = self.state, self._verdict
        present = frozenset(self._available_workers(epoch))
        self._verdict = None
        self._quiet_period.observe((present, epoch.shape_epoch), step, state.now)
        at_odds = state.members.has_empty_slot(epoch) or state.members.waiting_members(epoch)
        follows = {member.worker for member in epoch.present_members} - state.members.required_workers
        busy = follows or state.members.leave_deadlines or not state.recovery_metrics.epoch_step_s
        if busy or not at_odds:
            self._quiet_period.is_decided &= verdict is None
            return None
        if verdict is not None and self._asked == (present, epoch.number):
            state.log_event("decision", verdict=verdict.kind, layout=verdict.layout, why=verdict.why)
            return None if verdict.depths is None else (verdict.depths, verdict.why)
        if verdict is not None:  # the epoch has changed, with the same workers
            self._quiet_period.is_decided = False
        if self._quiet_period.is_due(step, state.now):
            self._quiet_period.is_decided = True
            if state.setup.reconfigure != "never":
                self._asked = present, epoch.number
                state.emit(DecideReshape(epoch.number))
        return None

    def handle_decided(self, event: ReshapeDecided) -> None:
        """Keep what the policy has decided until the next commit."""
        if self._asked is not None and event.epoch == self._asked[1]:
            self._verdict = event.verdict

    def policy_case(self) -> PolicyCase:
        """The inputs of a decision about the shape, as they are now."""
        state, epoch, metrics = self.state, self.state.epoch, self.state.recovery_metrics
        assert epoch is not None
        lost = len(state.members.departed_nodes)
        return PolicyCase(
            strategy=state.setup.strategy_object,
            reconfigure=state.setup.reconfigure,
            step_times=self._known_step_times,
            state=self._policy_state(epoch),
            shape=_current_shape(epoch, state),
            plan=epoch.plan,
            measured_step_s=metrics.epoch_step_s,
            remaining_steps=state.setup.steps - state.ledger.next_step,
            time_between_losses_s=(state.now - state.started_at) / lost if lost else math.inf,
            measured_reshape_s=metrics.reshape_s,
            now=state.now,
        )

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

    # Too little memory.

    def request_smaller_stages(self, verdict: ReshapeVerdict) -> None:
        """Change to this shape as soon as the open steps allow it."""
        self._smaller_stages = verdict

    def reshape_for_memory(self, halt: EpochHalt, old: Epoch) -> Flow[NextEpoch | None]:
        """The epoch with smaller stages, if they are needed and no worker has updated its weights in an open step,
        which is run again. None: continue in the current shape."""
        verdict, inputs = self._smaller_stages, self._reshape_inputs(halt, old)
        if verdict is None or verdict.depths is None or inputs.layers_without_holder:
            return None
        if any_weights_after(halt.inventories, inputs.step):
            return None
        self._take_intent()
        found = yield from self._reshape_or_refuse(inputs, verdict.depths, verdict.why)
        self._smaller_stages = None
        return found

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

    def reshape_if_due(self, halt: EpochHalt, old: Epoch) -> Flow[NextEpoch | None]:
        """The epoch with another shape if a change is due: it was planned and no step is open, or a node was lost under
        `templates`. None: continue in the current shape."""
        intent, inputs = self._take_intent(), self._reshape_inputs(halt, old)
        if inputs.layers_without_holder or not self._is_supported:
            return None
        if halt.lost_nodes:
            rebuilds = inputs.setup.strategy_object.rebuilds_pipelines
            return (yield from self._reshape_or_refuse(inputs)) if rebuilds else None
        if intent is None or intent.first_step > inputs.step or any_weights_after(halt.inventories, inputs.step):
            return None
        found = yield from self._reshape_or_refuse(inputs, intent.depths, intent.why, intent.shape)
        self._quiet_period.is_decided = True
        if self._requested_shape is intent.shape:  # else another layout has been requested since
            self._requested_shape = None
        return found

    def _take_intent(self) -> ReshapeIntent | None:
        """Take the planned change. If it is not carried out now, it has to be decided again."""
        intent, self.intent = self.intent, None
        if intent is not None:
            self._quiet_period.is_decided = False
            if intent.requested and self._requested_depths is None and self._requested_shape is None:
                self._requested_shape = intent.shape
        return intent

    def reshape_from_layers(self, halt: EpochHalt, old: Epoch) -> Flow[NextEpoch | None]:
        """Recover from a half-finished change of shape: some stage has no holder, but every layer has. None: a layer
        has none either."""
        self._take_intent()
        inputs = self._reshape_inputs(halt, old)
        if inputs.layers_without_holder or not self._is_supported:
            return None
        return (yield from self._reshape_or_refuse(inputs))

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

    def _reshape_or_refuse(
        self, inputs: ReshapeInputs, depths: Depths | None = None, why: str = "", shape: PipelineShape | None = None
    ) -> Flow[NextEpoch | None]:
        """The epoch with pipelines of these depths, or with the template for the remaining nodes: then the open step is
        discarded and run again. None: that is impossible."""
        try:
            planned: PlannedEpoch = yield PlanReshape(
                number=inputs.epoch_number,
                workers=dict(inputs.workers),
                inventories=dict(inputs.inventories),
                step=inputs.step,
                zones=dict(inputs.zones),
                depths=depths,
                why=why,
                shape=shape,
            )
        except PlanError as error:
            layout = "the template for the present nodes" if depths is None else f"the layout {format_depths(depths)}"
            self.state.log_event("refused", why=f"{layout}: {error}")
            return None
        return NextEpoch(planned.epoch, planned.why, planned.source)

    def complete_open_step_first(self, next_epoch: NextEpoch) -> NextEpoch:
        """Some worker has already updated its weights in the open step, so that step must be completed: apply the
        template after it, and begin no other step before."""
        start = next_epoch.epoch.start
        self.intent = ReshapeIntent(None, "", start)
        return replace(next_epoch, epoch=msgspec.structs.replace(next_epoch.epoch, stop_before=start))


def _current_depths(epoch: Epoch, state: LeaderState) -> Depths:
    return _current_shape(epoch, state).depths


def _current_shape(epoch: Epoch, state: LeaderState) -> PipelineShape:
    return epoch.shape or initial_shape(state.initial_setup)
