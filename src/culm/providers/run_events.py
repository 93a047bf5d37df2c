"""Events of a run that the launcher shows: a node was lost, a node joined, the run recovered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from culm.cluster.leader.recovery_record import RecoveryRecord
from culm.text_format import count_noun


class NodeLostEvent(NamedTuple):
    """A node was lost during the run."""

    node: int
    worker_exit: str = ""
    """How its worker process ended, if that is known and it was not killed."""


class NodeJoinedEvent(NamedTuple):
    """A node joined during the run. It gets a slot if one is empty, or if another shape makes use of it."""

    node: int
    has_empty_slot: bool = True
    """Whether a slot is empty."""


class NodePlacedEvent(NamedTuple):
    """A node that joined during the run runs layers from now on."""

    node: int
    slots: str
    layers: str
    empty_slots: int
    """Slots that are still empty."""


class ShapeEvent(NamedTuple):
    """The leader will arrange the nodes into another shape."""

    layout: str
    step: int
    """The first step in the new shape."""
    why: str


class StorageEvent(NamedTuple):
    """The storage of the run fails or works again: the fields of `storage_failed` or `storage_recovered`."""

    fields: Mapping[str, Any]


class IncidentEvent(NamedTuple):
    """Something that the leader reports in one sentence, such as an exception on a node."""

    text: str


class MachineEvent(NamedTuple):
    """A sentence about a process of this machine that is not a node."""

    text: str


RunEvent = (
    MachineEvent
    | IncidentEvent
    | NodeLostEvent
    | NodeJoinedEvent
    | NodePlacedEvent
    | ShapeEvent
    | StorageEvent
    | RecoveryRecord
)


def event_line(event: RunEvent) -> str:
    """The event as a line of text."""
    match event:
        case MachineEvent(text) | IncidentEvent(text):
            line = text
        case NodeLostEvent(node, worker_exit):
            line = f"node {node} is gone" + (f": its worker {worker_exit}" if worker_exit else "")
        case NodeJoinedEvent(node, True):
            line = f"node {node} joined: it gets the layers of an empty slot"
        case NodeJoinedEvent(node):
            line = f"node {node} joined: every slot is filled, so it waits for a loss or for a shape that uses it"
        case NodePlacedEvent(node, slots, layers, empty):
            left = f"{count_noun(empty, 'slot')} still empty" if empty else "every slot is filled"
            line = f"node {node} runs layers {layers} in slot {slots}; {left}"
        case ShapeEvent(layout, step, why):
            line = f"the shape will be {layout} from step {step + 1} on: {why}"
        case StorageEvent(fields):
            line = storage_sentence(fields)
        case _:
            line = _recovery_line(event)
    return line


def _recovery_line(event: RecoveryRecord) -> str:
    milliseconds = event.detect_ms + event.decide_ms + event.move_ms + event.redo_ms
    nodes = format_numbered(event.lost, "node")
    again = "nothing" if not event.redone_actions else count_noun(event.redone_actions, "action")
    changed = " (its samples are left out: training changes)" if event.source == "drop" else ""
    how = f"by {event.source}{changed}: {again} run again, {milliseconds:.0f} ms"
    return f"step {event.step} went on without {nodes}, {how}"


def storage_sentence(fields: Mapping[str, Any]) -> str:
    """A change of the storage's health as a line of text."""
    if fields["kind"] == "storage_failed":
        return f"{fields['path']} cannot be written, {fields['delayed']} is retried: {fields['why']}"
    skipped = [f"without the checkpoints of steps {', '.join(map(str, fields.get('skipped_checkpoints', ())))}"]
    dropped = [f"{count_noun(fields.get('dropped_lines', 0), 'line')} lost"]
    rest = skipped * bool(fields.get("skipped_checkpoints")) + dropped * bool(fields.get("dropped_lines"))
    return ", ".join([f"{fields['path']} can be written again after {fields['seconds']:.1f} s", *rest])


def format_numbered(numbers: Sequence[int], noun: str) -> str:
    """Numbered things as text: node 3; nodes 1 and 2."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    *most, last = map(str, numbers)
    return f"{noun}s {', '.join(most)} and {last}" if most else f"no {noun}"
