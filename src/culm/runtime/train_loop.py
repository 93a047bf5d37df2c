"""The training loop: what one worker does in one epoch.

Open steps of the previous epoch are completed first. Then steps are run, reported and saved until the run ends or
another epoch begins. One step is, from top to bottom:

    train_loop -> executor -> segment -> transport -> grad_reduce -> optimizer_step
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from culm.runtime import messages
from culm.runtime.evaluation import evaluate
from culm.runtime.executor import Executor
from culm.runtime.grad_reduce import SegmentGradientReducer
from culm.runtime.handoff import store_partial_sum
from culm.runtime.optimizer_step import OptimizerStep
from culm.runtime.replay import OpenStepReplay
from culm.runtime.shadow_replicas import ShadowReplicas, send_shadow_copies
from culm.runtime.worker_reports import build_final_report, build_step_report

if TYPE_CHECKING:
    from culm.runtime.checkpoint_io import CheckpointWriter
    from culm.runtime.epoch import Epoch, Shadow
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.step_limits import StepLimits
    from culm.transport.interface import FrameKey, Tensors

_MIN_DRAIN_S, _DRAIN_ACTIONS = 10.0, 20
"""Limit for a device to finish what was launched on it: this many seconds, or the time of this many of its slowest
actions. More actions than can be under way, because the kernels of an optimizer step may be, too."""
_OUTPUT_NAME = re.compile(r"[0-9]+[FI][0-9]+")
"""Frame names of action outputs."""


class TrainLoop:
    """Builds the objects of an epoch and runs its steps.

    It ends when `run` returns, raises or is cancelled. The worker state, the step limits and the checkpoint writer
    outlive it.
    """

    def __init__(self, context: EpochContext, limits: StepLimits, checkpoint_writer: CheckpointWriter) -> None:
        self._context, self._limits, self._checkpoint_writer = context, limits, checkpoint_writer
        self._job, self._epoch, self._clock = context.job, context.epoch, context.clock
        self._state, self._plan = context.state, context.plan
        self._reducer = SegmentGradientReducer(context)
        self._optimizer_step = OptimizerStep(context)
        self._shadows = ShadowReplicas(
            context, self._reducer, self._optimizer_step, self._report_caught_up, self._report_memory_full
        )
        self._executor = Executor(context, self._reducer, None if self._shadows.is_empty else self._shadows)
        self._replay = OpenStepReplay(
            context, self._executor, self._reducer, self._optimizer_step, self._report_handoff_received
        )

    @property
    def epoch(self) -> Epoch:
        """The epoch that this loop trains in."""
        return self._epoch

    @property
    def progress(self) -> tuple[int, float]:
        """(number of actions run, seconds of the slowest one) in this epoch."""
        return self._executor.progress

    async def run(self) -> None:
        """Join the groups, complete the open steps, run steps until the run ends, and send the final report."""
        context = self._context
        began = self._clock.now()
        await self._reducer.join_groups()
        seconds = self._clock.now() - began
        reduce, fallback = self._reducer.describe_groups()
        context.send_to_leader(
            messages.LayersReady(context.worker, self._epoch.number, seconds, reduce, reduce_fallback=fallback)
        )
        await self._replay.run()
        self._report_completed_steps()
        self._drop_unused_replicas()
        send_shadow_copies(context)
        await (self._run_steps() if context.segments else self._follow_as_shadow())
        context.send_to_leader(build_final_report(context, self._executor, self._shadows))

    def discard_failed_action(self) -> tuple[int, str] | None:
        """After an exception: discard what the action that raised it has left half done. Returns (step, action); None:
        no action of a step was computing."""
        return self._executor.discard_failed_action()

    @property
    def failed_action(self) -> tuple[int, str] | None:
        """After an exception: (step, action) of the action that raised it; None: no action of a step was computing."""
        return self._executor.failed_action

    def close(self) -> None:
        """Cancel the tasks of the epoch and leave its groups."""
        self._reducer.close()
        self._replay.close()
        self._executor.close()

    async def drain(self) -> None:
        """After `close`: wait until everything that was launched on the device is done, and kept where it has to be.
        Afterwards every action is either done or was not launched. Raises DeviceFailed if the device does not finish
        in time."""
        launched, copies = self._context.launched, self._state.copies
        if launched is not None:
            await copies.drain(max(_MIN_DRAIN_S, _DRAIN_ACTIONS * launched.slowest_action_s))
            await launched.drain()

    def keep_unused_frames(self, frames: dict[FrameKey, Tensors]) -> None:
        """Store frames that had arrived when the epoch ended and were not used yet: they may be the only copies."""
        stages = self._plan.stages
        for (_, step, name), tensors in frames.items():
            kind, _, rest = name.partition(" ")
            if step < self._limits.committed_steps:
                continue
            if kind == "sum" and int(rest) % stages in self._state.replicas:
                self._reducer.store_received_gradient(step, int(rest), tensors)
            elif kind == "part" and int(rest.split()[0]) % stages in self._state.replicas:
                store_partial_sum(self._context, step, int(rest.split()[0]), tensors)
            elif _OUTPUT_NAME.fullmatch(name):
                self._state.keep_output(step, name, tensors)

    def _report_caught_up(self, shadow: Shadow) -> None:
        """Report to the leader that a shadow replica has caught up."""
        context = self._context
        context.send_to_leader(messages.ShadowCaughtUp(context.worker, self._epoch.number, shadow.stage))

    def _report_memory_full(self, needed: int) -> None:
        """Report to the leader that forwards of shadow replicas are left out, for which there is no host memory."""
        context, copies = self._context, self._state.copies
        lent, cap = copies.pool.lent_bytes, copies.pool.cap
        context.send_to_leader(messages.ShadowMemoryFull(context.worker, self._epoch.number, needed, lent, cap))

    def _report_handoff_received(self) -> None:
        self._context.send_to_leader(messages.HandoffReceived(self._context.worker, self._epoch.number))

    def _drop_unused_replicas(self) -> None:
        """Delete replicas of stages that this worker neither runs nor shadows in this epoch."""
        slot = self._context.slot
        if slot in self._epoch.leaving_slots:
            return  # other workers may need anything it has until it ends
        used = {*self._plan.stages_of(slot)}
        used |= {shadow.stage for shadow in self._epoch.shadows if shadow.slot == slot}
        for stage in [stage for stage in self._state.replicas if stage not in used]:
            del self._state.replicas[stage]
        self._shadows.drop_stale()

    async def _run_steps(self) -> None:
        """Run steps until the run ends."""
        step, recovery = self._epoch.start, self._epoch.recovery
        if recovery.steps:
            await self._evaluate_and_save(step)
        while await self._wait_for_permission(step):
            await self._run_step(step)
            step += 1
            await self._evaluate_and_save(step)
        await self._catch_up_shadows(step)
        await self._checkpoint_writer.save(self._context, step, last=True)
        await self._checkpoint_writer.wait_until_written()

    async def _follow_as_shadow(self) -> None:
        """On a worker that runs no stage yet: make the steps of its shadow replicas, until they have caught up and
        another epoch begins."""
        step = self._epoch.start
        while await self._wait_for_permission(step):
            await self._shadows.follow_steps(step)
            self._shadows.promote_if_committed(self._limits.committed_steps)
            self._report_completed_steps()
            step += 1

    async def _wait_for_permission(self, step: int) -> bool:
        """Wait until the leader permits the step (True), or the run ends before it (False).

        Where losses can be recovered from, at most two steps are open, which bounds the memory for kept outputs. While
        a worker waits only for a commit, it updates its shadow replicas up to the step before, which the commit needs,
        and no further: updating beyond it could block on peers that are still computing.
        """
        limits = self._limits
        while True:
            limits.update_event.clear()  # before the checks: a message that arrives while shadows catch up is not lost
            if limits.ends_before(step):
                return False
            permitted = limits.may_run(self._epoch, step)
            if permitted and (not self._epoch.keeps_outputs or step <= limits.committed_steps + 1):
                return True
            await self._catch_up_shadows(step - 1 if permitted else step)
            await limits.update_event.wait()

    async def _catch_up_shadows(self, step: int) -> None:
        await self._shadows.catch_up(step)
        self._report_completed_steps()

    async def _run_step(self, step: int) -> None:
        """Run one step: the actions up to the reduced gradients, then the optimizer step, then the report."""
        context = self._context
        await self._executor.run_step(step)
        start = self._clock.now()
        await self._catch_up_shadows(step)
        replicas = [self._state.replicas[stage] for stage in self._plan.stages_of(context.slot)]
        await self._optimizer_step.run(step, replicas)
        end = self._clock.now()
        for g in context.segments:
            self._state.spans.append((step, f"{g}S", start, end))
        self._report_completed_steps()
        if not self._epoch.keeps_outputs:
            self._limits.commit(step + 1, self._state)

    def _report_completed_steps(self) -> None:
        """Report to the leader every step that all replicas here have made and that was not reported yet."""
        context, limits = self._context, self._limits
        stages = [*self._plan.stages_of(context.slot), *self._shadows.current_shadows]
        completed = min((self._state.replicas[stage].version for stage in stages), default=0)
        for step in sorted(self._state.open_steps):
            if limits.reported_until(self._epoch) <= step < completed:
                context.send_step_report(build_step_report(context, step, self._clock.now()))
                limits.mark_reported(self._epoch, step)

    async def _evaluate_and_save(self, completed_steps: int) -> None:
        """Evaluate and save between two steps, where they are due. All workers do so after the same steps."""
        # A step that was committed before this epoch began has been evaluated.
        is_evaluated = self._epoch.keeps_outputs and completed_steps <= self._limits.committed_steps
        if self._evaluation_due(completed_steps) and not is_evaluated:
            await self._evaluate(completed_steps)
        if self._checkpoint_due(completed_steps):
            await self._catch_up_shadows(completed_steps)  # so that holders can be compared
            await self._checkpoint_writer.save(self._context, completed_steps)

    def _evaluation_due(self, completed_steps: int) -> bool:
        interval, chosen = self._job.evaluation_interval, self._limits.evaluations
        return interval.is_due_by_count(completed_steps) or completed_steps in chosen

    def _checkpoint_due(self, completed_steps: int) -> bool:
        epoch = self._epoch
        if epoch.checkpoint_every and completed_steps % epoch.checkpoint_every == 0:
            return True
        if completed_steps in self._limits.checkpoints:
            return True
        if self._job.keep_best is not None and completed_steps and self._evaluation_due(completed_steps):
            return True  # the best evaluation has a checkpoint
        return (
            epoch.checkpoint_overdue
            and completed_steps == epoch.start + 1
            and self._checkpoint_writer.is_idle(epoch.number)
        )

    async def _evaluate(self, completed_steps: int) -> None:
        """Evaluate, report this worker's part, and wait until the step before is committed: a loss in the meantime is
        recovered with the current weights."""
        await self._catch_up_shadows(completed_steps)
        losses = await evaluate(self._context, completed_steps - 1)
        if losses:
            report = messages.EvaluationReport(self._context.worker, completed_steps - 1, tuple(losses))
            self._context.send_to_leader(report)
        limits = self._limits
        while self._epoch.keeps_outputs and limits.committed_steps < completed_steps:
            limits.update_event.clear()
            await limits.update_event.wait()
