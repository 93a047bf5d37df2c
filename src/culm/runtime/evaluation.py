"""Evaluation: run the forward-only plan over the evaluation set, between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from culm.runtime.compiled_ops import compile_ops
from culm.runtime.compute.batch_loading import evaluation_contribution, load_evaluation_batch
from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.runtime.compiled_ops import CompiledOp
    from culm.runtime.compute.batch_loading import Activations
    from culm.runtime.epoch_context import EpochContext

EvaluationPart: TypeAlias = tuple[int, float, float, tuple[float, ...]]


async def evaluate(context: EpochContext, step: int) -> list[EvaluationPart]:
    """Evaluate with the weights after `step`. Returns (micro-batch, loss, weight, values of Job.metrics) of each
    micro-batch whose last segment this worker runs."""
    epoch, job, device = context.epoch, context.job, context.state.device
    assert epoch.evaluation_plan is not None
    local_outputs: dict[str, Activations] = {}
    losses: list[EvaluationPart] = []
    for op in compile_ops(Plan.from_text(epoch.evaluation_plan), epoch, context.slot, context.segments):
        micro = op.action.micro
        assert micro is not None
        inputs, target = await _receive_inputs(context, step, op, local_outputs), None
        if op.action.segment == 0 or op.segment.is_last:
            batch, target, _ = load_evaluation_batch(job, micro, device)
            inputs = batch if op.action.segment == 0 else inputs
        outputs, result = op.segment.evaluate(micro, inputs, target)
        context.during_action(step, f"evaluate {op.label}")
        await context.after_action(step, f"evaluate {op.label}")
        for address in op.target_addresses:
            context.transport.send(address, context.frame_key(step, f"evaluate {op.label}"), outputs)
        if op.keep_local:
            local_outputs[op.label] = outputs
        if result.loss is not None:
            loss, weight = evaluation_contribution(job, micro, result.loss, result.weight)
            losses.append((micro, loss, weight, tuple(map(float, result.values))))
    return losses


async def _receive_inputs(
    context: EpochContext, step: int, op: CompiledOp, local_outputs: dict[str, Activations]
) -> Any:
    """The input of a forward: from a frame, or from an earlier forward on this worker."""
    if op.local_input is not None:
        return local_outputs.pop(op.local_input)
    if op.input_frame is None:
        return ()
    frame = await context.transport.receive(context.frame_key(step, f"evaluate {op.input_frame}"))
    copies = context.state.copies
    return copies.to_device(frame)
