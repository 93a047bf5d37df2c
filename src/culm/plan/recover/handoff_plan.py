"""Handoff: which work a leaving worker still finishes, and to which workers it sends its results. Pure.

Gradient sums and kept tensors can be transferred, tapes cannot. So a worker under notice starts nothing new, finishes
the micro-batches whose tapes it has (all other workers run what these need first), sends its sums to a staying worker,
and leaves without waiting for the end of the step. A micro-batch that it has no time for is restarted by another
holder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from culm.plan.recover.lineage import MissingWork, WorkerInventory, WorkItem, WorkKey
from culm.plan.recover.place_work import RunnerPool, best_placement
from culm.plan.recover.recovery_bound import RecoveryBound
from culm.plan.recover.task_dependencies import StepTask, task_dependencies
from culm.schedule import Action, Kind

T = TypeVar("T")
PartialSumTransfer = tuple[int, int, int, int]
"""(step, segment, source slot, target slot): a partial gradient sum that is sent to another worker."""


@dataclass(frozen=True)
class RecoverySchedule:
    """Task lists by worker, when all tasks are finished, and when the leaving workers have finished theirs."""

    task_lists: tuple[tuple[StepTask, ...], ...]
    makespan: float
    leavers_done_at: float = 0.0


ScheduleAttempt = Callable[[Mapping[int, WorkerInventory]], tuple[MissingWork, RecoverySchedule]]


def fit_into_notice(
    inventories: Mapping[int, WorkerInventory],
    leaving_slots: Collection[int],
    time_left: float,
    attempt: ScheduleAttempt,
) -> tuple[MissingWork, RecoverySchedule]:
    """Return the result of `attempt` in which leaving workers finish as many of their started micro-batches as fit into
    `time_left`, in the unit of the costs: older steps first, then those with the least work left."""
    tapes = sorted(_tapes_of_leavers(inventories, leaving_slots), key=lambda tape: (tape[1].step, *tape))

    def with_first(count: int) -> tuple[MissingWork, RecoverySchedule]:
        return attempt(_keep_tapes(inventories, leaving_slots, tapes[:count]))

    best = with_first(len(tapes))
    if best[1].leavers_done_at <= time_left:
        return best
    fits, too_many, best = 0, len(tapes), with_first(0)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        candidate = with_first(middle)
        if candidate[1].leavers_done_at <= time_left:
            fits, best = middle, candidate
        else:
            too_many = middle
    return best


def _tapes_of_leavers(
    inventories: Mapping[int, WorkerInventory], leaving_slots: Collection[int]
) -> Iterator[tuple[bool, WorkKey, int]]:
    """(whether the whole backward is still to do, key, slot) of each tape that only leaving workers have."""
    staying = [inventory for slot, inventory in inventories.items() if slot not in leaving_slots]
    staying_keys = {
        key
        for each in staying
        for keys in (each.tapes_after_forward, each.tapes_after_input_grad, each.accumulated_grads)
        for key in keys
    }
    for slot in set(leaving_slots) & inventories.keys():
        yield from ((False, key, slot) for key in inventories[slot].tapes_after_input_grad if key not in staying_keys)
        yield from ((True, key, slot) for key in inventories[slot].tapes_after_forward if key not in staying_keys)


def _keep_tapes(
    inventories: Mapping[int, WorkerInventory],
    leaving_slots: Collection[int],
    tapes: Collection[tuple[bool, WorkKey, int]],
) -> dict[int, WorkerInventory]:
    """The inventories with the tapes of leaving workers limited to `tapes`."""
    kept = dict(inventories)
    for slot in set(leaving_slots) & inventories.keys():
        tapes_of = {
            before_backward: tuple(key for w, key, at in tapes if (w, at) == (before_backward, slot))
            for before_backward in (True, False)
        }
        kept[slot] = msgspec.structs.replace(
            inventories[slot], tapes_after_forward=tapes_of[True], tapes_after_input_grad=tapes_of[False]
        )
    return kept


def schedule_items(
    items: Sequence[WorkItem],
    pool: RunnerPool,
    default_runners: Mapping[tuple[int, int], int],
    leaving_slots: Collection[int],
    bound: RecoveryBound,
) -> RecoverySchedule:
    """Place the items; within each step those first that leaving workers have to finish, with their inputs. `bound` is
    the lower bound for all items together."""
    if not any(item.tape_holder in leaving_slots for item in items):
        placement = best_placement(items, pool, default_runners, bound)
        return RecoverySchedule(placement.task_lists, placement.makespan)
    lists: list[list[StepTask]] = [[] for _ in range(pool.worker_count)]
    end = leavers_done_at = 0.0
    for group in _urgent_groups(items, leaving_slots):
        placement = best_placement(group, pool, default_runners)
        end += placement.makespan
        leavers_done_at = end if any(item.tape_holder in leaving_slots for item in group) else leavers_done_at
        for row, tasks in zip(lists, placement.task_lists, strict=True):
            row.extend(tasks)
    return RecoverySchedule(tuple(map(tuple, lists)), end, leavers_done_at)


def _urgent_groups(items: Sequence[WorkItem], leaving_slots: Collection[int]) -> Iterator[list[WorkItem]]:
    """By step: first the items that leaving workers have started, with everything they depend on; then the rest. No
    item of the first group needs one of the second, so lists with the second group at the end can run in order."""
    for step in sorted({item.key.step for item in items}):
        of_step = [item for item in items if item.key.step == step]
        urgent = _with_sources([item for item in of_step if item.tape_holder in leaving_slots], of_step)
        yield from filter(
            None, ([item for item in of_step if item in urgent], [item for item in of_step if item not in urgent])
        )


def _with_sources(wanted: Collection[WorkItem], items: Sequence[WorkItem]) -> set[WorkItem]:
    """The wanted items and every item that they depend on, directly or indirectly."""
    owner = [item for item in items for _ in item.kinds]
    tasks = [
        StepTask(step, Action(g, kind, micro), output_only)
        for (step, g, micro), kinds, output_only, _ in items
        for kind in kinds
    ]
    sources: dict[WorkItem, list[WorkItem]] = {}
    for source, target, _ in task_dependencies(tasks):
        sources.setdefault(owner[target], []).append(owner[source])
    closure, pending = set(wanted), list(wanted)
    while pending:
        new = [item for item in sources.get(pending.pop(), ()) if item not in closure]
        closure.update(new)
        pending += new
    return closure


def prefer_staying_holders(missing: MissingWork, leaving_slots: Collection[int]) -> MissingWork:
    """The same work, with tensors that several workers have taken from staying workers first."""

    def sort(holders: Mapping[T, tuple[int, ...]]) -> dict[T, tuple[int, ...]]:
        return {key: tuple(sorted(slots, key=lambda slot: slot in leaving_slots)) for key, slots in holders.items()}

    return MissingWork(missing.items, sort(missing.outputs), sort(missing.input_grads), sort(missing.complete_sums))


def partial_sum_transfers(
    inventories: Mapping[int, WorkerInventory],
    task_lists: Sequence[Sequence[StepTask]],
    complete_sums: Collection[tuple[int, int]],
    runners: Mapping[int, Sequence[Sequence[int]]],
    leaving_slots: Collection[int],
) -> tuple[PartialSumTransfer, ...]:
    """Transfers of the incomplete sums that leaving workers have, or will have after their tasks: each to a runner."""
    transfers: list[PartialSumTransfer] = []
    for slot in sorted(set(leaving_slots) & inventories.keys()):
        own = {(key.step, key.segment) for key in inventories[slot].accumulated_grads}
        own |= {
            (t.step, t.action.segment)
            for t in task_lists[slot]
            if t.action.kind in (Kind.W, Kind.B) and not t.output_only
        }
        transfers += [(step, g, slot, runners[step][g][0]) for step, g in sorted(own - set(complete_sums))]
    return tuple(transfers)
