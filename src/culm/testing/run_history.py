"""Run history: what happened in a simulated run, to explain why it failed."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from culm.cluster.run_setup import decode_node_record
from culm.cluster.store.store import StoreChange
from culm.plan.reshape.pipeline_shape import format_depths
from culm.runtime import messages
from culm.runtime.epoch import Epoch
from culm.testing.virtual_time import virtual_loop


class HistoryEntry(NamedTuple):
    """An event in virtual seconds since the start of the run; node None: it concerns all nodes."""

    t: float
    node: int | None
    what: str

    def __str__(self) -> str:
        node_text = "" if self.node is None else f"node {self.node}"
        return f"{self.t:12.6f}  {node_text:8} {self.what}"


class RunHistory:
    """Faults and their effects on the cluster; of the actions, only the last one of each node."""

    def __init__(self) -> None:
        self.entries: list[HistoryEntry] = []
        self._last: dict[int, tuple[float, int, str]] = {}
        """By node: time, step and name of the last action done. Formatted only when the history is printed."""

    def add(self, node: int | None, what: str) -> None:
        self.entries.append(HistoryEntry(virtual_loop().now_s, node, what))

    def on_action_done(self, node: int, step: int, action: str) -> None:
        """Record that a node has done an action."""
        self._last[node] = virtual_loop().now_s, step, action

    def on_store_change(self, change: StoreChange) -> None:
        """Record a change in the store."""
        what = describe_change(change)
        if what:
            self.add(None, what)

    def __str__(self) -> str:
        last = (
            HistoryEntry(t, node, f"was last at {did} of step {step}") for node, (t, step, did) in self._last.items()
        )
        return "\n".join(str(entry) for entry in (*self.entries, *sorted(last)))


def describe_change(change: StoreChange) -> str:
    """A change in the store in a few words; empty if it is not worth an entry."""
    key, value = change
    if value is None:
        return f"{key} is gone from the store"
    if key == "epoch":
        epoch = messages.decode(value)
        assert isinstance(epoch, Epoch)
        members = (str(member.worker) if member else "-" for member in epoch.members)  # a slot may be empty
        shape = f", made {format_depths(epoch.shape.depths)}" if epoch.shape is not None and epoch.changes_shape else ""
        return f"epoch {epoch.number}{shape}: members {' '.join(members)}"
    if key == "step":
        return f"step {msgspec.msgpack.decode(value)['step']} is committed"
    if key.startswith("nodes/"):
        return f"node {key.removeprefix('nodes/')} has joined" if decode_node_record(value).workers else ""
    return {"leader": f"node {value.decode(errors='replace')} leads", "result": "there is a result"}.get(key, "")
