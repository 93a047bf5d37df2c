"""Sends and receives, derived from the placement of the actions. They are never written by hand."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule.action import INPUT_GRAD_KINDS, Action, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from culm.schedule.plan import Plan


class TensorTransfer(NamedTuple):
    """The output of `producer` is sent from worker `source` to worker `target`."""

    producer: Action
    source: int
    target: int


class ActionWithTransfers(NamedTuple):
    """An action with the tensors it receives before and sends after it.

    Tensors that pass between two actions of the same worker are in neither: the executor keeps them locally.
    """

    action: Action
    receives: tuple[TensorTransfer, ...]
    sends: tuple[TensorTransfer, ...]


@lru_cache(maxsize=8)
def derive_transfers(plan: Plan) -> tuple[tuple[ActionWithTransfers, ...], ...]:
    """Each worker's list with its sends and receives. The plan must be one that `check_plan` accepts.

    Cached: all workers of a simulated cluster ask for the same plan.
    """
    placement = plan.placement()
    incoming = {
        action: _incoming_transfer(action, worker, plan.segments, placement) for action, worker in placement.items()
    }
    outgoing: defaultdict[Action, list[TensorTransfer]] = defaultdict(list)
    for transfer in incoming.values():
        if transfer is not None:
            outgoing[transfer.producer].append(transfer)

    def with_transfers(action: Action) -> ActionWithTransfers:
        transfer = incoming.get(action)
        return ActionWithTransfers(action, () if transfer is None else (transfer,), tuple(outgoing.get(action, ())))

    return tuple(tuple(map(with_transfers, actions)) for actions in plan.workers)


def producing_action(action: Action, segments: int, placement: Mapping[Action, int]) -> Action | None:
    """The action of a neighbouring segment whose output this action uses, or None.

    F uses the output of the previous segment; I and B use the gradient from the next segment, computed by its I or B
    as placed. Everything an action needs from its own segment is on the same worker.
    """
    segment, kind, micro = action
    if kind is Kind.F:
        return Action(segment - 1, Kind.F, micro) if segment else None
    if kind not in INPUT_GRAD_KINDS or segment == segments - 1:
        return None
    split = Action(segment + 1, Kind.I, micro)
    return split if split in placement else Action(segment + 1, Kind.B, micro)


def _incoming_transfer(
    action: Action, worker: int, segments: int, placement: Mapping[Action, int]
) -> TensorTransfer | None:
    producer = producing_action(action, segments, placement)
    if producer is None or placement[producer] == worker:
        return None
    return TensorTransfer(producer, placement[producer], worker)
