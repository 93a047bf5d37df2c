"""Lineage: what has to be run, or run again, so that every open step can be completed. Pure.

Survivors report what they have finished, summed and kept. Starting from what is missing, the dependencies of the step
are followed backwards: a gradient that was lost with its worker needs its W, a W needs the tape of its F and a gradient
from the next segment, and these need outputs of other segments. Micro-batches and steps do not depend on each other, so
each is handled separately, and the result is minimal: it contains only work that something missing depends on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from culm.schedule import Kind

T = TypeVar("T")
NO_DROPPED_MICROS: Mapping[int, Collection[int]] = {}


class WorkKey(NamedTuple):
    """A micro-batch of a step in a segment."""

    step: int
    segment: int
    micro: int


class WorkerInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What one survivor has of the open steps. All of it remains valid after the epoch in which it was computed."""

    weight_versions: dict[int, int] = {}
    """By stage held: the step that its weights are for. Weights of earlier open steps are kept too."""
    copied_at: dict[int, int] = {}
    """By stage that was copied: the step that the copy was for. Weights of earlier steps are not here."""
    tapes_after_forward: tuple[WorkKey, ...] = ()
    """F is finished and its tape is here."""
    tapes_after_input_grad: tuple[WorkKey, ...] = ()
    """I is finished too: the tape waits for W."""
    accumulated_grads: tuple[WorkKey, ...] = ()
    """W is in the local sum, which has not been reduced over the holders yet."""
    outputs: tuple[WorkKey, ...] = ()
    """Outputs of F that are kept here."""
    input_grads: tuple[WorkKey, ...] = ()
    """Outputs of I (or B) that are kept here."""
    complete_sums: tuple[tuple[int, int], ...] = ()
    """(step, segment) of the complete gradient sums that are here."""
    rebuild_epoch: int = 0
    """The epoch in which this worker built or loaded its layers (see Epoch.rebuild_epoch); 0: it has none."""
    shape_epoch: int = 0
    """The epoch whose shape defines the stage and segment numbers above (see Epoch.shape_epoch)."""
    layers_by_step: dict[int, tuple[int, ...]] = {}
    """By step that weights are for: the layers that are here at that step, independent of the shape."""


class WorkItem(NamedTuple):
    """Actions to run for a key, in this order and by one worker."""

    key: WorkKey
    kinds: tuple[Kind, ...]
    output_only: bool = False
    """Only the output is needed: the gradient of the weights is in a sum already and must not be added twice."""
    tape_holder: int | None = None
    """The worker with the tape that the item continues from; None: any holder of the segment can start it."""


@dataclass(frozen=True)
class MissingWork:
    """Work items, in no particular order, and the holders of everything that they start from."""

    items: tuple[WorkItem, ...]
    outputs: Mapping[WorkKey, tuple[int, ...]]
    """Holders of the outputs of F."""
    input_grads: Mapping[WorkKey, tuple[int, ...]]
    complete_sums: Mapping[tuple[int, int], tuple[int, ...]]
    """(step, segment): holders of the complete sum."""


def find_missing_work(
    inventories: Mapping[int, WorkerInventory],
    steps: Iterable[int],
    *,
    segments: int,
    micro_batches: int,
    split: bool = True,
    dropped_micros: Mapping[int, Collection[int]] = NO_DROPPED_MICROS,
) -> MissingWork:
    """The smallest set of actions that completes the steps, given the survivors' inventories by worker.

    `split` says how a restarted backward is run: as I and W, or as B. `dropped_micros`, by step, need no work. Every
    layer must have a holder; the caller checks that.
    """
    holders = _Holders(inventories)
    items: list[WorkItem] = []
    for step in steps:
        for micro in (micro for micro in range(micro_batches) if micro not in dropped_micros.get(step, ())):
            items += _missing_of_micro_batch(holders, step, micro, segments, split)
    return MissingWork(tuple(items), holders.outputs, holders.input_grads, holders.complete_sums)


class _Holders:
    """The inventories inverted: the holders of each item."""

    def __init__(self, inventories: Mapping[int, WorkerInventory]) -> None:
        self.tapes_after_forward = _holders_by_thing(
            {worker: each.tapes_after_forward for worker, each in inventories.items()}
        )
        self.tapes_after_input_grad = _holders_by_thing(
            {worker: each.tapes_after_input_grad for worker, each in inventories.items()}
        )
        self.accumulated_grads = _holders_by_thing(
            {worker: each.accumulated_grads for worker, each in inventories.items()}
        )
        self.outputs = _holders_by_thing({worker: each.outputs for worker, each in inventories.items()})
        self.input_grads = _holders_by_thing({worker: each.input_grads for worker, each in inventories.items()})
        self.complete_sums = _holders_by_thing({worker: each.complete_sums for worker, each in inventories.items()})


def _holders_by_thing(items_by_worker: Mapping[int, Iterable[T]]) -> dict[T, tuple[int, ...]]:
    holders: dict[T, tuple[int, ...]] = {}
    for worker, items in sorted(items_by_worker.items()):
        for item in items:
            holders[item] = (*holders.get(item, ()), worker)
    return holders


def _missing_of_micro_batch(holders: _Holders, step: int, micro: int, segments: int, split: bool) -> list[WorkItem]:
    """One micro-batch of one step: gradients are requested from the first segment on, outputs from the last back."""
    items: list[WorkItem] = []
    forward = [False] * segments  # whether F is run for its tape
    gradient_wanted = False  # whether the previous segment runs a backward and needs a gradient
    for segment in range(segments):
        key = WorkKey(step, segment, micro)
        backward = _backward_items(holders, key, gradient_wanted, split)
        items += backward
        forward[segment] = any(Kind.F in item.kinds for item in backward)
        gradient_wanted = any(kind in (Kind.I, Kind.B) for item in backward for kind in item.kinds)
    output_wanted = False
    for segment in reversed(range(segments)):
        key = WorkKey(step, segment, micro)
        if output_wanted and not forward[segment] and key not in holders.outputs:
            items.append(WorkItem(key, (Kind.F,), output_only=True))
            forward[segment] = True
        output_wanted = forward[segment]
    return items


def _backward_items(holders: _Holders, key: WorkKey, gradient_wanted: bool, split: bool) -> list[WorkItem]:
    """The items of a key whose gradient is missing from the sum, or is needed by the previous segment."""
    items: list[WorkItem] = []
    whole = (Kind.I, Kind.W) if split else (Kind.B,)
    if key not in holders.accumulated_grads and (key.step, key.segment) not in holders.complete_sums:
        if key in holders.tapes_after_input_grad:
            items.append(WorkItem(key, (Kind.W,), tape_holder=holders.tapes_after_input_grad[key][0]))
        elif key in holders.tapes_after_forward:
            items.append(WorkItem(key, whole, tape_holder=holders.tapes_after_forward[key][0]))
        else:
            items.append(WorkItem(key, (Kind.F, *whole)))
    gradient_available = key in holders.input_grads or any(
        kind in (Kind.I, Kind.B) for item in items for kind in item.kinds
    )
    if gradient_wanted and not gradient_available:
        tape = holders.tapes_after_forward.get(key)
        if tape:
            items.append(WorkItem(key, (Kind.I,), output_only=True, tape_holder=tape[0]))
        else:
            items.append(WorkItem(key, (Kind.F, Kind.I), output_only=True))
    return items
