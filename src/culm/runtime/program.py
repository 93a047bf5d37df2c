"""The program of a worker: its list of actions with their communication resolved. Compiled once an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.plan.recover import made, needed
from culm.schedule import Action, Kind, Plan, lower

if TYPE_CHECKING:
    from culm.runtime.epoch import Epoch
    from culm.runtime.segment import Segment


@dataclass(slots=True)
class Op:
    """An action with its communication resolved."""

    action: Action
    segment: Segment
    label: str
    name: str | None
    """What its output goes by: 2F0, or 1I3 for a gradient, whether I or B made it."""
    source: str | None
    """Name of the frame that it waits for; None: found at home, or made from data."""
    home: str | None
    """Name of the value that lies here: an earlier action of this worker left it, or it was kept."""
    targets: tuple[str, ...]
    """Addresses that its output goes to."""
    keeps: bool
    """Whether a later action of this worker takes its output."""
    again: bool = False
    """Run for its output alone: nothing is counted and no tape stays."""
    halves: bool = False
    """Of an F: whether its backward comes in halves here."""


def compiled(plan: Plan, epoch: Epoch, slot: int, segments: Mapping[int, Segment]) -> list[Op]:
    """What a slot runs in a plan, in order: sends and receives are derived from the placement."""
    lowered = lower(plan)[slot] if slot < len(plan.workers) else ()
    halved = cells_halved(action for action, _, _ in lowered)
    ops = []
    for action, receives, sends in lowered:
        needs, makes = needed(action, plan.segments), made(action)
        taken = makes is not None and (
            action.segment + 1 < plan.segments if action.kind is Kind.F else action.segment > 0
        )
        ops.append(
            Op(
                action=action,
                segment=segments[action.segment],
                label=str(action),
                name=None if makes is None else str(makes),
                source=str(needs) if receives else None,
                home=str(needs) if needs is not None and not receives else None,
                targets=tuple(epoch.address(edge.target) for edge in sends),
                keeps=taken and not sends,
                halves=(action.segment, action.micro) in halved,
            )
        )
    return ops


def cells_halved(actions: Iterable[Action]) -> set[tuple[int, int | None]]:
    """(segment, micro-batch) of each I in a list."""
    return {(action.segment, action.micro) for action in actions if action.kind is Kind.I}
