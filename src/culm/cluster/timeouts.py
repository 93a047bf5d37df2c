"""Every timeout of a cluster, derived from the one setting `suspect_after`. Pure.

The user sets how long a machine may be silent. All other timeouts follow from it, are checked against each other and
are printed at the start of a run: contradictory timeouts are a common way to lose healthy nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace

from culm.errors import UsageError

MIN_LEASE_S = 2.0
"""etcd does not grant shorter leases."""
DEFAULT_BLOCKED_S = 60.0
"""How long the event loop of a node may be blocked, unless configured otherwise."""
_LEASE_CHECK_S = 1.0
"""etcd checks for expired leases twice a second and revokes them one after the other."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All timeouts in seconds, with their meaning. Create them with `derive_timeouts`, which checks them."""

    suspect_after: float = field(metadata={"means": "a silent machine is declared lost (the setting)"})
    heartbeat: float = field(metadata={"means": "between two heartbeats of a worker to its agent"})
    lease: float = field(metadata={"means": "a node's keys stay in the store after its last keepalive"})
    keepalive: float = field(metadata={"means": "between two keepalives of a node to the store"})
    blocked: float = field(metadata={"means": "a blocked event loop of a node keeps its lease (a setting)"})
    store_call: float = field(metadata={"means": "one endpoint of the store may take to answer"})
    connect: float = field(metadata={"means": "connecting to a peer may take"})
    progress: float = field(metadata={"means": "one action may take before its worker counts as hung"})
    confirm_loss: float = field(metadata={"means": "a report of an unreachable peer waits for the store"})
    adopt: float = field(metadata={"means": "a member may take to its first heartbeat in an epoch"})
    end: float = field(metadata={"means": "a stopping worker may take to end"})
    drain: float = field(metadata={"means": "of a preemption notice, reserved for the handover"})


def derive_timeouts(
    suspect_after: float = 5.0,
    *,
    slowest_action: float = 0.0,
    blocked_after: float = DEFAULT_BLOCKED_S,
    **overrides: float,
) -> Timeouts:
    """Derive all timeouts from `suspect_after` and from `slowest_action`, the seconds of the plan's longest action.

    `blocked_after`: how long the event loop of a node may make no progress before its lease is left to expire. It is
    never below the lease.

    `overrides` replace single timeouts by name. Raises UsageError if the result is inconsistent.
    """
    if not (math.isfinite(suspect_after) and 0.1 <= suspect_after <= 600):
        raise UsageError(f"suspect_after is {suspect_after}: give seconds from 0.1 to 600 (default 5)")
    if not (math.isfinite(blocked_after) and 1 <= blocked_after <= 86_400):
        raise UsageError(f"blocked_after is {blocked_after}: give seconds from 1 to 86400 (default 60)")
    lease = max(MIN_LEASE_S, math.ceil(suspect_after))
    timeouts = Timeouts(
        suspect_after=suspect_after,
        heartbeat=suspect_after / 5,
        lease=lease,
        keepalive=lease / 3,
        blocked=max(blocked_after, lease),
        store_call=lease / 4,
        connect=suspect_after,
        progress=2 * suspect_after + 5 * slowest_action,
        confirm_loss=lease + suspect_after + _LEASE_CHECK_S,
        adopt=12 * suspect_after + 5 * slowest_action,
        end=suspect_after,
        drain=2 * suspect_after,
    )
    return check_timeouts(_with_overrides(timeouts, overrides))


def check_timeouts(timeouts: Timeouts) -> Timeouts:
    """Return the timeouts if they are consistent. Raises UsageError that names the first pair that is not."""
    for name, seconds, _ in timeout_table(timeouts):
        if not seconds > 0:
            raise UsageError(f"{name} is {seconds} s: use a timeout above zero")
    for lower, low, upper, high, why in _order_constraints(timeouts):
        if low > high:
            raise UsageError(f"{lower} ({low:g} s) must not be above {upper} ({high:g} s): {why}")
    return timeouts


def timeout_table(timeouts: Timeouts) -> list[tuple[str, float, str]]:
    """Name, seconds and meaning of each timeout, for printing."""
    return [(entry.name, getattr(timeouts, entry.name), entry.metadata["means"]) for entry in fields(timeouts)]


def _order_constraints(t: Timeouts) -> list[tuple[str, float, str, float, str]]:
    """The pairs that must be in order, each with the reason: (lower name, seconds, upper name, seconds, reason)."""
    return [
        ("3 x heartbeat", 3 * t.heartbeat, "suspect_after", t.suspect_after, "one late heartbeat is not a failure"),
        ("the shortest lease", MIN_LEASE_S, "lease", t.lease, "etcd grants none below 2 s"),
        ("suspect_after", t.suspect_after, "lease", t.lease, "the keys of a silent node would expire too early"),
        (
            "keepalive + 2 x store_call",
            t.keepalive + 2 * t.store_call,
            "lease",
            t.lease,
            "one silent endpoint must not cost a node its lease",
        ),
        ("suspect_after", t.suspect_after, "progress", t.progress, "a busy worker gets longer than a silent one"),
        ("progress", t.progress, "adopt", t.adopt, "a worker that has not started gets longer than a running one"),
        ("lease", t.lease, "blocked", t.blocked, "a loop that is late for one lease is not hung"),
        ("lease", t.lease, "confirm_loss", t.confirm_loss, "the store needs time to report a lost node"),
        ("end", t.end, "drain", t.drain, "the handover includes stopping the worker"),
    ]


def _with_overrides(timeouts: Timeouts, overrides: dict[str, float]) -> Timeouts:
    known = [entry.name for entry in fields(timeouts)]
    for name in overrides:
        if name not in known:
            raise UsageError(f"{name} is not a timeout: choose one of {', '.join(known)}")
    return replace(timeouts, **overrides)
