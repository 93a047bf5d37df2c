"""What fills the memory of a worker: the parts of the fullest worker, on its device and on the host. Pure.

Weights, gradients, optimizer state, saved weights and copies stay; activations are those of the micro-batches in
flight, as many as 1F1B keeps. On an accelerator, sums and tensors that were sent lie in host memory, and a reserve for
context, library buffers (NCCL) and fragmentation is taken off the device's memory beforehand (`USABLE_MEMORY_SHARE`).
A worker that computes on the CPU has one memory for everything, fragmentation included. `culm bench memory` compares
this with the peaks of real workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from msgspec import structs

from culm.text_format import format_bytes

if TYPE_CHECKING:
    from culm.plan.model.model_profile import LayerCost

_FRAMES_AHEAD = 2
"""Frames of each kind that have arrived and wait for their action, as a pipeline in balance has them."""
_OPEN_STEPS = 2
"""Steps whose tensors are kept at the same time. A step is committed soon after its last reduce; with shadows only when
these have made it, too, during the next step."""

_SHADOW_TAPES_ON_DEVICE = 2
"""Forwards of a replica whose activations are on the device, on their way to the host
(`culm.runtime.shadow_tapes.MAX_LEAVING`)."""

HOST_WORKSPACE_TENSORS = 10
"""Temporary memory of a worker on the CPU in multiples of its largest tensor: a gradient before it is added, two
temporaries of Adam, packed operands of matrix products, and the holes that they leave in the heap. Fitted to
`culm bench memory`."""
SUM_BUCKET_BYTES = 25 << 20
"""Bytes that one all-reduce sums: large enough for the network, small enough to copy."""
HOST_ALLOCATOR_SHARE = 0.03
"""Memory that the allocator of the CPU loses to fragmentation, as a share of what stays. Fitted likewise."""


class KeepingStrategy(Protocol):
    """What a strategy keeps beside the model."""

    keeps_outputs: bool
    shadows_every_stage: bool
    eager_forwards: bool


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """Bytes of one worker."""

    stage: int
    on_accelerator: bool
    """Whether sums and kept frames are in the memory of the host, not of the device."""
    weights: int
    gradients_and_optimizer: int
    copies: int
    """Buffers, and weights in another precision that stay."""
    saved_weights: int
    """Weights before an open step, from which a recovery repeats its actions."""
    activations: int
    shadow: int
    """The replica of the next stage, if the strategy keeps one."""
    shadow_activations: int
    """Activations of the replica that are on the device, if the strategy runs forwards in advance."""
    workspace: int
    """Temporary memory of sums and optimizer steps; on a CPU also of layers, and fragmentation."""
    sums: int
    """Copies on which gradients are summed over the pipelines, kept until the commit."""
    frames: int
    """Outputs and gradients that were sent and are kept until the commit, and those that have arrived."""
    off_loaded: int
    """Activations of the replica that have left the accelerator: of all micro-batches, if there is as much memory."""

    @property
    def on_host(self) -> int:
        """Bytes in the memory of the host, page-locked for a GPU, if the worker computes on an accelerator."""
        return self.sums + self.frames + self.off_loaded if self.on_accelerator else 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self._parts().values())

    def _parts(self) -> dict[str, int]:
        parts = {
            "weights": self.weights, "gradients and optimizer": self.gradients_and_optimizer,
            "copies": self.copies, "saved weights": self.saved_weights, "activations": self.activations,
            "shadow": self.shadow, "activations of the shadow": self.shadow_activations, "workspace": self.workspace,
        }  # fmt: skip
        return parts if self.on_accelerator else parts | {"sums": self.sums, "frames": self.frames}

    def as_json(self) -> dict[str, int]:
        return {**asdict(self), "on_host": self.on_host, "total": self.total}

    def describe(self) -> str:
        """The parts in one line, the largest first."""
        ranked = sorted((part for part in self._parts().items() if part[1]), key=lambda part: -part[1])
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in ranked)
        what = "sums, frames and activations of the shadow" if self.off_loaded else "sums and frames"
        host = f"; {format_bytes(self.on_host)} of {what} are in host memory"
        return listed + (host if self.on_host else "")


def worker_memories(
    segments: Sequence[Sequence[LayerCost]],
    micro_batches: int,
    *,
    pipelines: int,
    strategy: KeepingStrategy,
    on_accelerator: bool,
    stages: int | None = None,
    in_flight: Sequence[int] | None = None,
    exact: bool = False,
) -> list[WorkerMemory]:
    """The memory of a worker of each stage. `micro_batches` are those of a pipeline.

    `stages`: how many share the segments, one after the other; default: a stage for each segment. `in_flight`:
    activations by segment; default: as many as 1F1B keeps. `exact`: sums are integers of 8 bytes.
    """
    count = len(segments)
    live = in_flight or [min(count - g, micro_batches) for g in range(count)]
    P = stages or count
    own_segments = [range(stage, count, P) for stage in range(P)]
    by_stage = [[layer for g in own for layer in segments[g]] for own in own_segments]
    return [
        _worker_memory(
            stage,
            by_stage[stage],
            by_stage[(stage + 1) % P] if strategy.shadows_every_stage else [],
            activations=sum(live[g] * _activation_bytes(segments[g]) for g in own),
            largest_shadow_tape=max((_activation_bytes(segments[g]) for g in own_segments[(stage + 1) % P]), default=0)
            if strategy.eager_forwards
            else 0,
            sent_bytes=sum(_boundary_bytes(segments, g) + _boundary_bytes(segments, g - 1) for g in own),
            micro_batches=micro_batches,
            sums_gradients=pipelines > 1,
            keeps_outputs=strategy.keeps_outputs,
            on_accelerator=on_accelerator,
            exact=exact,
        )
        for stage, own in enumerate(own_segments)
    ]


def fullest_worker(
    segments: Sequence[Sequence[LayerCost]],
    micro_batches: int,
    *,
    pipelines: int,
    strategy: KeepingStrategy,
    on_accelerator: bool,
) -> WorkerMemory:
    """The memory of the worker that needs most."""
    workers = worker_memories(
        segments, micro_batches, pipelines=pipelines, strategy=strategy, on_accelerator=on_accelerator
    )
    return max(workers, key=lambda worker: worker.total)


@lru_cache(maxsize=1024)
def with_overhead(layers: tuple[LayerCost, ...], *, keeps_outputs: bool) -> tuple[LayerCost, ...]:
    """The layers with what an accelerator needs of memory for each beside the model, without shadows: to cut a model
    so that it fits."""
    times = 2 if keeps_outputs else 1
    return tuple(
        structs.replace(layer, buffer_bytes=layer.buffer_bytes + times * layer.parameter_bytes) for layer in layers
    )


def explain_memory_misfit(
    memories: Sequence[WorkerMemory], available: int, *, where: str, strategy: str, layers: int
) -> str | None:
    """One sentence: which stage needs more than is available on the device, and the fix. None: all fit."""
    fullest = max(memories, key=lambda memory: memory.total)
    if fullest.total <= available:
        return None
    fixes = []
    if len(memories) < layers:
        fixes.append(f"more --stages than {len(memories)}")
    if fullest.shadow_activations and fullest.total - fullest.shadow_activations <= available:
        fixes.append("--strategy shadow-lazy, which runs nothing in advance")
    if fullest.shadow and fullest.total - fullest.shadow - fullest.shadow_activations <= available:
        fixes.append("--strategy reroute, which keeps no shadows")
    fixes.append("Job.recompute or a smaller micro_batch" if fullest.activations else "a device with more memory")
    return (
        f"stage {fullest.stage} needs {format_bytes(fullest.total)} of device memory under {strategy} "
        f"({fullest.describe()}), and {where} has {format_bytes(available)}: use {', or '.join(fixes)}"
    )


def _worker_memory(
    stage: int,
    own: Sequence[LayerCost],
    following: Sequence[LayerCost],
    *,
    activations: int,
    largest_shadow_tape: int,
    sent_bytes: int,
    micro_batches: int,
    sums_gradients: bool,
    keeps_outputs: bool,
    on_accelerator: bool,
    exact: bool,
) -> WorkerMemory:
    """`following`: the layers that it replicates. `largest_shadow_tape`: activations of one forward of their replica;
    0: none is run in advance. `sent_bytes`: of one micro-batch."""
    weights = sum(layer.parameter_bytes for layer in own)
    held = weights + sum(layer.parameter_bytes for layer in following)
    overlap = 0 if not keeps_outputs else _OPEN_STEPS if following else 1
    state = sum(layer.state_bytes for layer in own)
    copies = sum(layer.buffer_bytes for layer in own)
    shadow = sum(layer.resident_bytes for layer in following)
    copies_of_sums = overlap if overlap else int(sums_gradients)
    summed = _trained_bytes((*own, *following)) if overlap else _trained_bytes(own)
    sums = copies_of_sums * summed * (2 if exact else 1)
    frames = _OPEN_STEPS * micro_batches * sent_bytes if keeps_outputs else 0
    has_tapes = on_accelerator and largest_shadow_tape > 0
    if on_accelerator:
        frames += _FRAMES_AHEAD * sent_bytes
        workspace = weights  # the copy that goes to the host, and the temporaries of an optimizer that steps at once
    else:
        largest = max(max(layer.largest_parameter_bytes, layer.output_bytes) for layer in (*own, *following))
        stays = weights + state + copies + shadow + overlap * held + sums
        bucket = (
            _largest_bucket(own, exact=exact) if sums_gradients else 0
        )  # it leaves a hole that only such a bucket fills
        workspace = bucket + round(HOST_WORKSPACE_TENSORS * largest + HOST_ALLOCATOR_SHARE * stays)
    return WorkerMemory(
        stage=stage,
        on_accelerator=on_accelerator,
        weights=weights,
        gradients_and_optimizer=state,
        copies=copies,
        saved_weights=overlap * held,
        activations=activations,
        shadow=shadow,
        shadow_activations=_SHADOW_TAPES_ON_DEVICE * largest_shadow_tape if has_tapes else 0,
        workspace=workspace,
        sums=sums,
        frames=frames,
        off_loaded=micro_batches * _activation_bytes(following) if has_tapes else 0,
    )


def _activation_bytes(layers: Sequence[LayerCost]) -> int:
    """Of one micro-batch."""
    return sum(layer.activation_bytes for layer in layers)


def _boundary_bytes(segments: Sequence[Sequence[LayerCost]], boundary: int) -> int:
    """Bytes that cross the boundary after a segment, in either direction."""
    return segments[boundary][-1].output_bytes if 0 <= boundary < len(segments) - 1 else 0


def _trained_bytes(layers: Sequence[LayerCost]) -> int:
    """Bytes of the parameters that have gradients: frozen layers have no state."""
    return sum(layer.parameter_bytes for layer in layers if layer.state_bytes)


def _largest_bucket(layers: Sequence[LayerCost], *, exact: bool) -> int:
    """Bytes of the largest bucket of several layers. Frozen layers are not summed."""
    largest = size = members = 0
    for layer in layers:
        if not layer.state_bytes:
            continue
        summed = layer.parameter_bytes * (2 if exact else 1)
        if members and size + summed > SUM_BUCKET_BYTES:
            size = members = 0
        size, members = size + summed, members + 1
        largest = max(largest, size if members > 1 else 0)
    return largest
