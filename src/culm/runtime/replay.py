"""Recovery on one worker: complete the steps that were open when the previous epoch ended, before new ones begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from culm.plan.recover.recovery_plan import RecoveryTransfers, produced_tensor, required_tensor
from culm.runtime.compiled_ops import CompiledOp, split_backward_cells
from culm.runtime.handoff import HandoffReceiver, add_handed_off_sums, send_partial_sums

if TYPE_CHECKING:
    from culm.plan.recover.task_dependencies import StepTask
    from culm.runtime.compute.segment import Segment
    from culm.runtime.epoch_context import EpochContext
    from culm.runtime.executor import Executor
    from culm.runtime.grad_reduce import SegmentGradientReducer
    from culm.runtime.optimizer_step import OptimizerStep
    from culm.transport.interface import FrameSource


class OpenStepReplay:
    """Carries out this worker's part of the epoch's recovery plan."""

    def __init__(
        self,
        context: EpochContext,
        executor: Executor,
        reducer: SegmentGradientReducer,
        optimizer_step: OptimizerStep,
        on_handoff_received: Callable[[], None],
    ) -> None:
        """`on_handoff_received` is called once in an epoch in which nodes leave: when everything that their workers
        had for this one has arrived."""
        self._context, self._executor = context, executor
        self._reducer, self._optimizer_step = reducer, optimizer_step
        self._on_handoff_received = on_handoff_received
        self._state, self._slot, self._recovery = context.state, context.slot, context.epoch.recovery
        self._transfers = RecoveryTransfers(self._recovery, context.plan.segments)
        self._handoff: HandoffReceiver | None = None
        self._frames: FrameSource = context.transport

    async def run(self) -> None:
        """Resend kept outputs, run missing actions, reduce and step, one open step after the other.

        The worker of a leaving node only completes its actions and hands over what it has.
        """
        epoch, steps = self._context.epoch, self._recovery.steps
        for step in steps:
            self._resend_outputs(step)
            self._reducer.send_missing_gradients(step)
        tasks = self._recovery.tasks_of(self._slot) if steps else []
        tasks_by_step = {step: [task for task in tasks if task.step == step] for step in steps}
        if self._slot in epoch.leaving_slots:
            for step in steps:
                await self._run_tasks_before_leaving(step, tasks_by_step[step])
                await send_partial_sums(self._context, step)
            return
        if epoch.leaving_slots:
            self._frames = self._handoff = HandoffReceiver(
                self._context, self._reducer, self._transfers, self._on_handoff_received
            )
        for step in steps:
            await self._complete_step(step, tasks_by_step[step])

    def close(self) -> None:
        """Stop receiving hand-offs, if there are any. Called when the epoch ends."""
        if self._handoff is not None:
            self._handoff.close()

    def _resend_outputs(self, step: int) -> None:
        """Send kept outputs of an open step to the workers that need them and can get them from no other worker."""
        outputs = self._state.open_steps[step].outputs
        for name, receivers in self._transfers.tensors_to_resend(step, self._slot):
            for receiver in receivers:
                self._context.send(receiver, step, name, outputs[name])

    async def _complete_step(self, step: int, tasks: Sequence[StepTask]) -> None:
        """Complete one step here: run the tasks, receive the reduced gradients that others have, and step the replicas
        that have not made the step."""
        recovery, replicas = self._recovery, self._state.replicas
        stages = recovery.weight_versions[self._slot]
        behind = [replica for replica in replicas.values() if replica.version == step and replica.stage in stages]
        segments = {
            g: segment
            for replica in behind
            for g, segment in replica.segments.items()
            if self._slot in recovery.runners[step][g]
        }
        await self._run_tasks(step, tasks, segments)
        for replica in behind:
            for g in replica.segments:
                if g not in self._state.open_steps[step].reduced_gradients:
                    await (self._handoff or self._reducer).receive_reduced_gradient(step, g)
        if behind:
            await self._optimizer_step.run(step, behind, recovery.slots_behind(step))
        elif stages:
            await self._optimizer_step.send_step_values(step, recovery.slots_behind(step))

    async def _run_tasks(self, step: int, tasks: Sequence[StepTask], segments: dict[int, Segment]) -> None:
        """Run the tasks of a step, and reduce each segment as soon as its sum is complete here."""
        ops = self._compile_tasks(step, tasks, segments)
        for g, segment in segments.items():
            self._state.stats_for(step, g, segment)
        last_op = {op.action.segment: number for number, op in enumerate(ops) if not op.output_only}
        to_reduce = [g for g in segments if self._recovery.holder_of_sum(step, g) is None]
        for g in to_reduce:
            if g not in last_op:
                await self._start_reduce(step, g)
        for number, op in enumerate(ops):
            await self._executor.run_action(step, op, self._frames)
            g = op.action.segment
            if g in to_reduce and last_op.get(g) == number:
                await self._start_reduce(step, g)
        await self._executor.wait_until_complete()
        await self._reducer.wait_until_reduced(step, to_reduce)

    async def _start_reduce(self, step: int, g: int) -> None:
        await self._reducer.start_reduce(step, g, self._recovery.runners[step][g], self._add_handed_off_and_reduce)

    async def _add_handed_off_and_reduce(self, step: int, g: int, runners: tuple[int, ...]) -> None:
        """Reduce a segment whose sum may include sums of leaving workers, of this epoch or of an earlier one."""
        if self._handoff is not None:
            await self._handoff.wait_for_partial_sums(step, g)
        add_handed_off_sums(self._context, step, g)
        await self._reducer.reduce(step, g, runners)

    async def _run_tasks_before_leaving(self, step: int, tasks: Sequence[StepTask]) -> None:
        """On the worker of a leaving node: run its tasks of a step without reducing."""
        replicas = [replica for replica in self._state.replicas.values() if replica.version == step]
        segments = {g: s for replica in replicas for g, s in replica.segments.items()}
        for op in self._compile_tasks(step, tasks, segments):
            await self._executor.run_action(step, op, self._frames)
        await self._executor.wait_until_complete()

    def _compile_tasks(self, step: int, tasks: Sequence[StepTask], segments: dict[int, Segment]) -> list[CompiledOp]:
        """Tasks with senders and receivers resolved from the recovery plan, which knows what each worker has."""
        transfers, slot = self._transfers, self._slot
        epoch, plan = self._context.epoch, self._context.plan
        replay_segments: dict[int, Segment] = {}
        for stage in {task.action.segment % plan.stages for task in tasks if task.output_only}:
            replay_segments |= self._state.replicas[stage].replay_segments(step)
        split_cells = split_backward_cells(task.action for task in tasks)
        ops = []
        for task in tasks:
            action = task.action
            needs, makes = required_tensor(action, plan.segments), produced_tensor(action)
            source = None if needs is None else transfers.source_of(step, needs, slot)
            receivers = [] if makes is None else transfers.consumers_of(step, makes)
            ops.append(
                CompiledOp(
                    action=action,
                    segment=replay_segments[action.segment] if task.output_only else segments[action.segment],
                    label=str(action),
                    output_name=None if makes is None else str(makes),
                    input_frame=str(needs) if source is not None and source != slot else None,
                    local_input=str(needs) if source == slot else None,
                    target_addresses=tuple(epoch.address(w) for w in receivers if w != slot),
                    keep_local=slot in receivers,
                    output_only=task.output_only,
                    splits_backward=(action.segment, action.micro) in split_cells,
                )
            )
        return ops
