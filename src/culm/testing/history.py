"""What happened in a simulated run, for people who want to know why it failed."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from culm.cluster.setup import decode_node
from culm.cluster.store import Change
from culm.plan.relayout import written
from culm.runtime import epoch as letters


class Entry(NamedTuple):
    """Something that happened, in virtual seconds since the start of the run; node None: to all of them."""

    t: float
    node: int | None
    what: str

    def __str__(self) -> str:
        who = "" if self.node is None else f"node {self.node}"
        return f"{self.t:12.6f}  {who:8} {self.what}"


class History:
    """Faults, and what became of the cluster; of the actions the last one of each node."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._last: dict[int, tuple[float, int, str]] = {}
        """By node: when it had done an action, of which step, and its name. Put into words only if somebody asks."""

    def note(self, node: int | None, what: str) -> None:
        self.entries.append(Entry(_now(), node, what))

    def reached(self, node: int, step: int, action: str) -> None:
        """An action was done."""
        self._last[node] = _now(), step, action

    def heard(self, change: Change) -> None:
        """A fact of the store has changed."""
        what = told(change)
        if what:
            self.note(None, what)

    def __str__(self) -> str:
        last = (Entry(t, node, f"was last at {did} of step {step}") for node, (t, step, did) in self._last.items())
        return "\n".join(str(entry) for entry in (*self.entries, *sorted(last)))


def told(change: Change) -> str:
    """A change in the store in a few words; none where it is no news."""
    key, value = change
    if value is None:
        return f"{key} is gone from the store"
    if key == "epoch":
        found = letters.decode(value)
        assert isinstance(found, letters.Epoch)
        members = (str(member.node) if member else "-" for member in found.members)  # a slot may be empty
        shape = f", made {written(found.shape.depths)}" if found.shape is not None and found.reshapes else ""
        return f"epoch {found.number}{shape}: members {' '.join(members)}"
    if key == "step":
        return f"step {msgspec.msgpack.decode(value)['step']} is committed"
    if key.startswith("nodes/"):
        return f"node {key.removeprefix('nodes/')} has joined" if decode_node(value).worker else ""
    return {"leader": f"node {value.decode(errors='replace')} leads", "result": "there is a result"}.get(key, "")


def _now() -> float:
    return asyncio.get_running_loop().time()
