"""Every timeout of a cluster, from the one setting `suspect_after`. Pure.

A user says how long a silent machine may be silent. Everything else follows, is checked for order, and is printed at
the start: timeouts that contradict each other are the classic way to lose healthy nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from culm.errors import UsageError

SHORTEST_LEASE_S = 2.0
"""etcd does not grant shorter ones."""
_LEASE_CHECK_S = 1.0
"""etcd looks for leases that ran out twice a second, and revokes them one after the other."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds, and what each is for. Made by `derive`, which checks them."""

    suspect_after: float = field(metadata={"means": "a silent machine is taken for dead (the setting)"})
    beat: float = field(metadata={"means": "between two beats of a worker to its agent"})
    lease: float = field(metadata={"means": "a node's keys outlive its last sign to the store"})
    keepalive: float = field(metadata={"means": "between two signs of a node to the store"})
    store_call: float = field(metadata={"means": "one endpoint of the store may take to answer"})
    connect: float = field(metadata={"means": "connecting to a peer may take"})
    progress: float = field(metadata={"means": "one action may take before its worker is stuck"})
    doubt: float = field(metadata={"means": "a report of a lost peer waits for the store"})
    adopt: float = field(metadata={"means": "a member may take to its first beat in an epoch"})
    end: float = field(metadata={"means": "a worker that was told to stop may take"})
    drain: float = field(metadata={"means": "of a spot notice, kept for handing over"})


def derive(suspect_after: float = 5.0, *, slowest_action: float = 0.0, **changed: float) -> Timeouts:
    """All timeouts from one; `slowest_action`: seconds of the longest one of the plan, where it is known.

    `changed` replaces some by name, for tests and for who knows better. UsageError: they are out of order.
    """
    if not (math.isfinite(suspect_after) and 0.1 <= suspect_after <= 600):
        raise UsageError(f"suspect_after is {suspect_after}: give seconds from 0.1 to 600 (default 5)")
    lease = max(SHORTEST_LEASE_S, math.ceil(suspect_after))
    made = Timeouts(
        suspect_after=suspect_after,
        beat=suspect_after / 5,
        lease=lease,
        keepalive=lease / 3,
        store_call=lease / 4,
        connect=suspect_after,
        progress=2 * suspect_after + 5 * slowest_action,
        doubt=lease + suspect_after + _LEASE_CHECK_S,
        adopt=12 * suspect_after + 5 * slowest_action,
        end=suspect_after,
        drain=2 * suspect_after,
    )
    return check(_changed(made, changed))


def check(times: Timeouts) -> Timeouts:
    """The same, if they are in order; else UsageError with the first pair that is not."""
    for name, seconds, _ in table(times):
        if not seconds > 0:
            raise UsageError(f"{name} is {seconds} s: a timeout is above zero")
    for lower, low, upper, high, why in _order(times):
        if low > high:
            raise UsageError(f"{lower} ({low:g} s) must not be above {upper} ({high:g} s): {why}")
    return times


def table(times: Timeouts) -> list[tuple[str, float, str]]:
    """Name, seconds and meaning of each, for printing at the start."""
    return [(found.name, getattr(times, found.name), found.metadata["means"]) for found in fields(times)]


def _order(t: Timeouts) -> list[tuple[str, float, str, float, str]]:
    """What must not be above what, and why."""
    return [
        ("3 x beat", 3 * t.beat, "suspect_after", t.suspect_after, "one late beat is no death"),
        ("the shortest lease", SHORTEST_LEASE_S, "lease", t.lease, "etcd grants none below 2 s"),
        ("suspect_after", t.suspect_after, "lease", t.lease, "a silent machine would be gone before it is suspected"),
        (
            "keepalive + 2 x store_call",
            t.keepalive + 2 * t.store_call,
            "lease",
            t.lease,
            "one endpoint that is silent must not cost a node its lease",
        ),
        ("suspect_after", t.suspect_after, "progress", t.progress, "a busy worker is given longer than a silent one"),
        ("progress", t.progress, "adopt", t.adopt, "who has not begun yet is given longer than who has"),
        ("lease", t.lease, "doubt", t.doubt, "the store must have time to say who is gone"),
        ("end", t.end, "drain", t.drain, "handing over includes tidying up"),
    ]


def _changed(times: Timeouts, changed: dict[str, float]) -> Timeouts:
    known = [found.name for found in fields(times)]
    for name in changed:
        if name not in known:
            raise UsageError(f"{name} is no timeout: there are {', '.join(known)}")
    return replace(times, **changed)
