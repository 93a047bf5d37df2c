"""Who does what in an epoch: node, slot and layers. No torch: launchers and pages read it, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.schedule import Plan

if TYPE_CHECKING:
    from culm.runtime.epoch import Epoch


class Post(NamedTuple):
    """A node in an epoch."""

    node: int
    slot: str
    """Written pipeline.stage."""
    layers: str
    """Those that it runs, as in 0-2, 5; empty: it runs none, and follows."""


def posts(epoch: Epoch) -> Iterator[Post]:
    """Of everyone who is there, by slot."""
    plan = Plan.from_text(epoch.plan)
    for slot, member in enumerate(epoch.members):
        if member is not None:
            segments = plan.segments_of(slot) if plan.stages_of(slot) else ()
            yield Post(member.node, plan.label(slot), spans(epoch.segments[segment] for segment in segments))


def spans(ranges: Iterable[tuple[int, int]]) -> str:
    """Layers [first, last + 1) for people, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return ", ".join(f"{first}" if end - first == 1 else f"{first}-{end - 1}" for first, end in joined)


def seats_of(epoch: Epoch) -> dict[str, Any]:
    """The same in the words of the event `epoch`: its members, and in the same order their slots."""
    plan = Plan.from_text(epoch.plan)
    filled = [(member.node, plan.label(slot)) for slot, member in enumerate(epoch.members) if member is not None]
    return {"members": [node for node, _ in filled], "slots": [slot for _, slot in filled]}
