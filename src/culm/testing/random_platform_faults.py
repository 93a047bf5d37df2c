"""Random faults of what surrounds the nodes, from a seed: storage, the store, frames, memory, slow nodes, exceptions.

They are added to the faults of a scenario, so that they combine with losses, notices and joins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from culm.cluster.node_faults import ClusterFault, FailNode, KillNode, NodeFault, NoticeToNode, PartitionNode, PauseNode
from culm.testing.fault_schedule import STORAGE_ERRORS, Faults, MemoryFlip

_WEIGHTS = {
    "slow node": 3,
    "block loop": 3,
    "flip frame": 2,
    "fail storage": 3,
    "stall storage": 1,
    "pause store": 2,
    "exception": 4,
}
_FLIP_SHARE = 0.3
"""The share of the scenarios with a flipped bit in memory, where holders are compared."""
ERRORS = ("simulated error", "CUDA error: an illegal memory access was encountered", "CUDA out of memory")
"""Exceptions that are raised inside actions: in a layer, in the loss or the data, and by a device."""


@dataclass(frozen=True, kw_only=True)
class PlatformLimits:
    """What a scenario survives."""

    nodes: int
    """Nodes at the start."""
    steps: int
    lease_s: float
    survives: Callable[[frozenset[int]], bool]
    """Whether the run can lose all of these nodes."""
    recovers: bool
    """Whether the run continues after a loss without a restart."""
    storage_from: int | None
    """From this step on storage may fail; None: the run has no storage."""
    compares_holders: bool
    """Whether a bit that flips in memory is found: in exact runs with checkpoints, while each layer has two holders."""


def lost_nodes(faults: Faults, lease_s: float) -> frozenset[int]:
    """The nodes that a schedule of faults may cost the run."""
    lost: set[int] = set()
    for fault in faults.all:
        silent = isinstance(fault, PauseNode | PartitionNode) and fault.seconds > lease_s
        if silent or isinstance(fault, KillNode | NoticeToNode | FailNode):
            assert isinstance(fault, NodeFault)
            lost.update(fault.nodes)
    return frozenset(lost)


def add_platform_faults(rng: random.Random, faults: Faults, limits: PlatformLimits) -> Faults:
    """The schedule with one or two more faults, each of which the run survives together with the others. Now and then
    with a flipped bit in place of its losses."""
    if limits.compares_holders and limits.recovers and rng.random() < _FLIP_SHARE:
        faults = Faults(tuple(fault for fault in faults.all if _keeps_holders(fault, limits.lease_s)))
        faults = faults.flip_memory(rng.randrange(limits.nodes), step=rng.randrange(2), nth=rng.randint(1, 4))
    for _ in range(rng.choice((1, 1, 2))):
        kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        faults = _add(rng, faults, kind, limits)
    return faults


def _add(rng: random.Random, faults: Faults, kind: str, limits: PlatformLimits) -> Faults:  # noqa: PLR0911
    """The schedule with a fault of this kind or, if the run does not survive that, with a slow node."""
    node, lost = rng.randrange(limits.nodes), lost_nodes(faults, limits.lease_s)
    flips = any(isinstance(fault, MemoryFlip) for fault in faults.all)  # the holders must be there to be compared
    moment = _moment(rng, limits)
    brief = round(rng.uniform(0.01, rng.choice((0.5, 3.0)) * limits.lease_s), 3)
    match kind:
        case "block loop":
            return faults.block_loop(node, seconds=brief, **moment)
        case "flip frame":
            return faults.flip_frame(node, nth=rng.randint(1, 30))
        case "fail storage" if limits.storage_from is not None:
            step = rng.randint(limits.storage_from, max(limits.storage_from, limits.steps - 1))
            return faults.fail_storage(
                node, seconds=brief, error=rng.choice(STORAGE_ERRORS), step=step, nth=rng.randint(1, 6)
            )
        case "stall storage" if limits.storage_from is not None:
            seconds = brief if rng.random() < 0.7 else round(rng.uniform(31.0, 40.0), 1)
            return faults.stall_storage(node, seconds=seconds, **moment)
        case "pause store" if limits.recovers and not flips:
            expired = rng.choice((None, node, rng.randrange(limits.nodes)))
            return faults.pause_store(rng.randrange(limits.nodes), seconds=brief, expired=expired, **moment)
        case "exception" if limits.recovers and not flips and limits.survives(lost | {node}):
            step = rng.randrange(2, limits.steps)  # before a committed step the job counts as faulty
            return faults.fail(node, step=step, nth=rng.randint(1, 10), error=rng.choice(ERRORS))
    return _slow(rng, faults, node, moment)


def _slow(rng: random.Random, faults: Faults, node: int, moment: dict[str, Any]) -> Faults:
    factor = round(rng.uniform(1.5, 8.0), 2)
    if rng.random() < 0.5:
        return faults.slow_node(node, factor=factor, **moment)
    return faults.slow_node(node, factor=factor, seconds=round(rng.uniform(0.05, 1.0), 3), **moment)


def _moment(rng: random.Random, limits: PlatformLimits) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"at": rng.choice(("adopt", "inventory", "adopt")), "nth": rng.randint(1, 2)}
    return {"step": rng.randrange(limits.steps), "nth": rng.randint(1, 10)}


def _keeps_holders(fault: ClusterFault, lease_s: float) -> bool:
    """Whether a fault leaves every layer its holders, which are compared then."""
    return not lost_nodes(Faults((fault,)), lease_s) and fault.call_name not in ("pause_store", "drop_message")
