"""Recovery on one worker: the steps that were open when the last epoch ended are completed before another begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from culm.plan.recover import made, needed
from culm.runtime.estate import Inheritance, hand_over
from culm.runtime.program import Op, cells_halved
from culm.transport.base import Key

if TYPE_CHECKING:
    from culm.plan.edges import Task
    from culm.runtime.closing import Closing
    from culm.runtime.executor import Executor
    from culm.runtime.segment import Segment


async def recover(executor: Executor, closing: Closing, inherited: Callable[[], None]) -> None:
    """Send again what was kept, run what is missing, add up and step, one open step after the other.

    A worker that leaves ends what it has begun and gives away what it has. Where somebody leaves, `inherited` is called
    once all that it had for this worker is here.
    """
    epoch, slot = executor.epoch, executor.slot
    steps = epoch.recovery.steps
    for step in steps:
        _resend(executor, step)
        executor.summing.give_lacking(step)
    tasks = epoch.recovery.tasks(slot) if steps else []
    asked = {step: [task for task in tasks if task.step == step] for step in steps}
    if slot in epoch.leaving:
        for step in steps:
            await _end_begun(executor, step, asked[step])
            hand_over(executor.summing, step)
        return
    if epoch.leaving:
        executor.inherit(Inheritance(executor, inherited))
    for step in steps:
        await _complete(executor, closing, step, asked[step])


def _resend(executor: Executor, step: int) -> None:
    """Send what was kept here of an open step to those who need it and have nobody else to take it from."""
    outputs = executor.desk.step(step).outputs
    for name, takers in executor.wiring.resends(step, executor.slot):
        for taker in takers:
            key = Key(executor.epoch.number, step, name)
            executor.transport.send(executor.epoch.address(taker), key, outputs[name])


async def _complete(executor: Executor, closing: Closing, step: int, tasks: Sequence[Task]) -> None:
    """One step: what is missing is run, sums that others have are taken, and layers that have not stepped do."""
    recovery, slot, desk = executor.epoch.recovery, executor.slot, executor.desk
    lacking = [h for h in desk.holdings.values() if h.version == step and h.stage in recovery.versions[slot]]
    run = {g: s for h in lacking for g, s in h.segments.items() if slot in recovery.runners[step][g]}
    await _run(executor, step, tasks, run)
    for holding in lacking:
        for g in holding.segments:
            if g not in desk.step(step).sums:
                await executor.summing.take(step, g)
    if lacking:
        await closing.close(step, lacking, recovery.needy(step))
    elif recovery.versions[slot]:
        await closing.tell(step, recovery.needy(step))


async def _run(executor: Executor, step: int, tasks: Sequence[Task], segments: dict[int, Segment]) -> None:
    """Run the tasks of a step, and add up each segment as soon as it is complete here."""
    recovery, summing = executor.epoch.recovery, executor.summing
    ops = _compiled(executor, step, tasks, segments)
    for g, segment in segments.items():
        executor.desk.book(step, g, segment)
    last = {op.action.segment: number for number, op in enumerate(ops) if not op.again}
    due = [g for g in segments if recovery.giver(step, g) is None]
    for g in due:
        if g not in last:
            await summing.start(step, g, recovery.runners[step][g])
    for number, op in enumerate(ops):
        await executor.run(step, op)
        g = op.action.segment
        if g in due and last.get(g) == number:
            await summing.start(step, g, recovery.runners[step][g])
    await summing.ended(step, due)


async def _end_begun(executor: Executor, step: int, tasks: Sequence[Task]) -> None:
    """For a worker that leaves: run its tasks of a step, and leave the sums as they are."""
    holdings = [holding for holding in executor.desk.holdings.values() if holding.version == step]
    segments = {g: s for holding in holdings for g, s in holding.segments.items()}
    for op in _compiled(executor, step, tasks, segments):
        await executor.run(step, op)


def _compiled(executor: Executor, step: int, tasks: Sequence[Task], segments: dict[int, Segment]) -> list[Op]:
    """Tasks with their communication resolved: it follows from who has what, which the recovery knows."""
    wiring, slot, plan = executor.wiring, executor.slot, executor.plan
    ghosts: dict[int, Segment] = {}
    for stage in {task.action.segment % plan.stages for task in tasks if task.again}:
        ghosts |= executor.desk.holdings[stage].ghost(step)
    halved = cells_halved(task.action for task in tasks)
    ops = []
    for task in tasks:
        action = task.action
        needs, makes = needed(action, plan.segments), made(action)
        source = None if needs is None else wiring.source(step, needs, slot)
        takers = [] if makes is None else wiring.takers(step, makes)
        ops.append(
            Op(
                action=action,
                segment=ghosts[action.segment] if task.again else segments[action.segment],
                label=str(action),
                name=None if makes is None else str(makes),
                source=str(needs) if source is not None and source != slot else None,
                home=str(needs) if source == slot else None,
                targets=tuple(executor.epoch.address(w) for w in takers if w != slot),
                keeps=slot in takers,
                again=task.again,
                halves=(action.segment, action.micro) in halved,
            )
        )
    return ops
