"""Evaluation: the F-only plan over the evaluation set, between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from culm.runtime.data import evaluation_batch, evaluation_share
from culm.runtime.executor import placed
from culm.runtime.program import compiled
from culm.schedule import Plan
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.runtime.data import Values
    from culm.runtime.executor import Executor
    from culm.runtime.program import Op


async def evaluate(executor: Executor, step: int) -> list[tuple[int, float, float]]:
    """(micro-batch, loss, weight) of each micro-batch that ends on this worker, with the weights after a step."""
    epoch, desk, job = executor.epoch, executor.desk, executor.job
    assert epoch.evaluation is not None
    home: dict[str, Values] = {}
    found: list[tuple[int, float, float]] = []
    for op in compiled(Plan.from_text(epoch.evaluation), epoch, executor.slot, executor.segments):
        micro = op.action.micro
        assert micro is not None
        given, target = await _given(executor, step, op, home), None
        if op.action.segment == 0 or op.segment.last:
            fresh, target = evaluation_batch(job, micro, desk.device)
            given = fresh if op.action.segment == 0 else given
        outputs, outcome = op.segment.evaluate(micro, given, target)
        await executor.clock.work(executor.node, step, f"evaluate {op.label}")
        for address in op.targets:
            executor.transport.send(address, _key(executor, step, op.label), outputs)
        if op.keeps:
            home[op.label] = outputs
        if outcome.loss is not None:
            found.append((micro, *evaluation_share(job, micro, outcome.loss, outcome.weight)))
    return found


async def _given(executor: Executor, step: int, op: Op, home: dict[str, Values]) -> Any:
    """What a forward starts from: a frame, or what an earlier one left here."""
    if op.home is not None:
        return home.pop(op.home)
    if op.source is None:
        return ()
    frame = await executor.transport.receive(_key(executor, step, op.source))
    return placed(frame, executor.desk.device)


def _key(executor: Executor, step: int, name: str) -> Key:
    return Key(executor.epoch.number, step, f"evaluate {name}")
