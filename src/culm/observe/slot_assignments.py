"""The assignment of nodes to slots and layers in an epoch. No torch: launchers and pages use it, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.runtime.epoch import Epoch


class SlotAssignment(NamedTuple):
    """The slot and layers of a worker in an epoch."""

    node: int
    slot: str
    """As pipeline.stage."""
    layers: str
    """The layers that it runs, as in 0-2, 5; empty: it only keeps shadow replicas."""


def slot_assignments(epoch: Epoch) -> Iterator[SlotAssignment]:
    """The assignments of all members, by slot."""
    plan = Plan.from_text(epoch.plan)
    for slot, member in enumerate(epoch.members):
        if member is not None:
            segments = plan.segments_of(slot) if plan.stages_of(slot) else ()
            yield SlotAssignment(
                member.node, plan.slot_label(slot), format_layer_ranges(epoch.segments[segment] for segment in segments)
            )


def format_layer_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Layer ranges [first, last + 1) as text; adjacent ranges are joined."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return ", ".join(f"{first}" if end - first == 1 else f"{first}-{end - 1}" for first, end in joined)


def epoch_event_fields(epoch: Epoch) -> dict[str, Any]:
    """The fields of the event `epoch`: the nodes of its members, and their slots in the same order. A node appears once
    for each of its workers."""
    plan = Plan.from_text(epoch.plan)
    filled = [(member.node, plan.slot_label(slot)) for slot, member in enumerate(epoch.members) if member is not None]
    return {"members": [node for node, _ in filled], "slots": [slot for _, slot in filled]}
