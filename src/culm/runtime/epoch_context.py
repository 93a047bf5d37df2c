"""What the objects of one epoch on one worker share: the epoch, the worker's place in it, its state and its I/O."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.runtime.launched_actions import LaunchedActions
from culm.runtime.messages import CollectReport, encode
from culm.schedule import Plan
from culm.transport.interface import FrameKey

if TYPE_CHECKING:
    from torch import Tensor

    from culm.job import Job
    from culm.runtime.clock import Clock
    from culm.runtime.compute.segment import Segment
    from culm.runtime.epoch import Epoch
    from culm.runtime.messages import Message, StepReport
    from culm.runtime.worker_state import StageReplica, WorkerState
    from culm.transport.interface import Transport


@dataclass(frozen=True, slots=True, eq=False)
class EpochContext:
    """The dependencies of an executor, its reducer, its optimizer step and its shadow replicas.

    Built once per epoch (`create`) and passed to each of them, so that no object reaches into another.
    """

    job: Job
    epoch: Epoch
    slot: int
    """The slot that this worker fills."""
    worker: int
    """The number of this worker in the run."""
    node: int
    plan: Plan
    """The plan of a step, parsed from `epoch.plan`."""
    state: WorkerState
    """Outlives the epoch."""
    segments: dict[int, Segment]
    """The segments that this worker runs, by number, in ascending order."""
    transport: Transport
    clock: Clock
    launched: LaunchedActions | None = None
    """The actions that were launched on the device and are not complete. None: the device is a CPU."""

    @classmethod
    def create(cls, epoch: Epoch, slot: int, state: WorkerState, transport: Transport, clock: Clock) -> EpochContext:
        """Build the context of `slot`. `state` must hold a replica of every stage that the plan gives to the slot."""
        member = epoch.members[slot]
        assert member is not None
        plan = Plan.from_text(epoch.plan)
        segments = {g: s for stage in plan.stages_of(slot) for g, s in state.replicas[stage].segments.items()}
        launched = None
        if not state.copies.is_synchronous:
            after_action = functools.partial(clock.after_action, member.node)
            launched = LaunchedActions(state, transport, clock, epoch.number, epoch.start, after_action)
        return cls(
            job=state.job,
            epoch=epoch,
            slot=slot,
            worker=member.worker,
            node=member.node,
            plan=plan,
            state=state,
            segments=dict(sorted(segments.items())),
            transport=transport,
            clock=clock,
            launched=launched,
        )

    def replica_of(self, g: int) -> StageReplica:
        """The replica held here of the stage that segment `g` belongs to, whether this worker runs or shadows it."""
        return self.state.replicas[g % self.plan.stages]

    def segment(self, g: int) -> Segment:
        """Segment `g` of the replica held here."""
        return self.replica_of(g).segments[g]

    def runner_slots(self, step: int, g: int) -> tuple[int, ...]:
        """The slots whose workers add to the gradient sum of segment `g` in a step.

        In a step that is recovered these are the workers that ran the segment until the loss.
        """
        recovery = self.epoch.recovery
        return recovery.runners[step][g] if step in recovery.steps else self.plan.holders_of(g)

    def frame_key(self, step: int, name: str) -> FrameKey:
        """The key of a frame of this epoch."""
        return FrameKey(self.epoch.number, step, name)

    def send(self, slot: int, step: int, name: str, tensors: Sequence[Tensor | None]) -> None:
        """Queue a frame for the worker of another slot."""
        self.transport.send(self.epoch.address(slot), self.frame_key(step, name), tensors)

    def send_to_leader(self, message: Message) -> None:
        """Queue a control message for the leader of the epoch."""
        self.transport.send_message(self.epoch.leader, encode(message))

    def send_step_report(self, report: StepReport) -> None:
        """Queue a step report for the leader, over the agent that collects those of this pipeline if there is one."""
        epoch, pipeline = self.epoch, self.slot // self.plan.stages
        if pipeline >= len(epoch.report_collectors):
            self.send_to_leader(report)
            return
        slots = range(pipeline * self.plan.stages, (pipeline + 1) * self.plan.stages)
        expected = sum(epoch.members[slot] is not None and slot not in epoch.leaving_slots for slot in slots)
        message = CollectReport(epoch.leader, expected, report)
        self.transport.send_message(epoch.report_collectors[pipeline], encode(message))

    def during_action(self, step: int, action: str) -> None:
        """Tell the clock that this worker has computed an action and counted nothing yet (`Clock.during_action`)."""
        self.clock.during_action(self.node, step, action)

    async def after_action(self, step: int, action: str) -> None:
        """Tell the clock that this worker finished an action (`Clock.after_action`)."""
        await self.clock.after_action(self.node, step, action)
