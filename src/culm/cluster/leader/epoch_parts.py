"""Parts of a large epoch: what the workers of some pipelines need of it. Pure.

The whole epoch of a thousand workers takes more than a megabyte, nearly all of it action lists. A worker needs those of
the workers that it exchanges tensors with. So pipelines that share no micro-batch get a part each: the epoch with the
lists of other pipelines left out. The store keeps the whole epoch, and a worker can always use that instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from culm.runtime.epoch import Epoch
from culm.schedule import Plan

LARGE_EPOCH_BYTES = 2**18
"""Larger epochs are sent in parts. Smaller ones are in the announcement itself."""


COLLECT_FROM_WORKERS = 128
"""From so many workers on, agents collect the step reports of a pipeline."""
FAN_OUT = 8
"""To how many agents an agent sends a part at most."""


class EpochGroup(NamedTuple):
    """Workers that receive the same part of an epoch."""

    workers: tuple[int, ...]
    part: Epoch


def epoch_digest(body: bytes) -> str:
    """The SHA-256 of an encoded epoch: announcements and parts name the epoch by it."""
    return hashlib.sha256(body).hexdigest()


def forwarding_shares(agents: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """To whom a part is sent so that all these agents get it: up to FAN_OUT agents, and for each the others that it
    forwards the part to."""
    heads = agents[:FAN_OUT]
    return [(head, tuple(agents[len(heads) + index :: len(heads)])) for index, head in enumerate(heads)]


def split_epoch(epoch: Epoch) -> Iterator[EpochGroup]:
    """The parts of an epoch. Each worker belongs to one group, and finds in its part the lists of all workers that it
    exchanges tensors with."""
    plan = Plan.from_text(epoch.plan)
    header, *lines = epoch.plan.splitlines()
    task_lists = epoch.recovery.task_lists
    for pipelines in _connected_pipelines(epoch, plan):
        slots = {slot for d in pipelines for slot in range(d * plan.stages, (d + 1) * plan.stages)}
        text = "\n".join(
            [header, *(line if slot in slots else f"{plan.slot_label(slot)}:" for slot, line in enumerate(lines))]
        )
        own_tasks = tuple(row if slot in slots else () for slot, row in enumerate(task_lists))
        part = msgspec.structs.replace(
            epoch,
            plan=f"{text}\n",
            recovery=msgspec.structs.replace(epoch.recovery, task_lists=own_tasks),
        )
        members = (epoch.members[slot] for slot in sorted(slots))
        yield EpochGroup(tuple(member.worker for member in members if member is not None), part)


def _connected_pipelines(epoch: Epoch, plan: Plan) -> Iterable[Sequence[int]]:
    """The pipelines in groups that share no micro-batch, no shadow replica and no layer move."""
    parent = list(range(plan.pipelines))

    def root(d: int) -> int:
        while parent[d] != d:
            parent[d] = parent[parent[d]]
            d = parent[d]
        return d

    runs: dict[int, int] = {}
    """By micro-batch: a pipeline that runs a part of it."""

    def join(d: int, micros: Iterable[int]) -> None:
        for micro in micros:
            parent[root(d)] = root(runs.setdefault(micro, d))

    for slot, row in enumerate(plan.workers):
        join(slot // plan.stages, {action.micro for action in row if action.micro is not None})
    for slot, tasks in enumerate(epoch.recovery.task_lists):
        join(slot // plan.stages, {int(action.split(_kind(action))[1]) for _, action, _ in tasks})
    for name, keepers in epoch.recovery.keepers.items():
        action = name.partition(" ")[2]
        for slot in keepers:
            join(slot // plan.stages, [int(action.split(_kind(action))[1])])
    pairs = [(shadow.slot, shadow.source) for shadow in epoch.shadows]
    pairs += [(source, target) for _, _, source, target in epoch.recovery.partial_sum_transfers]
    for one, other in pairs:
        parent[root(one // plan.stages)] = root(other // plan.stages)
    groups: dict[int, list[int]] = {}
    for d in range(plan.pipelines):
        groups.setdefault(root(d), []).append(d)
    return groups.values()


def _kind(action: str) -> str:
    """The letter of an action such as 5F12."""
    return action.lstrip("0123456789")[0]
