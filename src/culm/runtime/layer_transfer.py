"""Layer transfer: when the shape of a run changes, each worker receives the layers that it lacks from other workers.

One frame carries one layer: its parameters, buffers and optimizer state, as they are for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from culm.runtime.compute.snapshot import Snapshot, pack_snapshot, unpack_snapshot
from culm.runtime.replica_builder import build_replica
from culm.schedule import Plan
from culm.transport.interface import FrameKey

if TYPE_CHECKING:
    from culm.runtime.clock import Clock
    from culm.runtime.epoch import Epoch
    from culm.runtime.worker_state import StageReplica, WorkerState
    from culm.transport.interface import Transport


def send_layers(epoch: Epoch, slot: int, worker_state: WorkerState, transport: Transport) -> None:
    """Send the layers that other workers receive from this one. Copies are sent: the layers here may change after."""
    for move in epoch.layer_moves:
        if move.source == slot:
            for layer in move.layers:
                frame = pack_snapshot(_held_layer(worker_state, layer, epoch.committed_steps))
                transport.send(epoch.address(move.target), _layer_key(epoch, layer), frame)


async def receive_layers(
    epoch: Epoch,
    slot: int,
    worker_state: WorkerState,
    transport: Transport,
    clock: Clock,
    on_layer_received: Callable[[int], None],
    keep_alive: Callable[[], AbstractContextManager[None]],
) -> dict[int, StageReplica]:
    """Build a worker's replicas in the new shape, by stage, from layers held here and layers that others send.

    `on_layer_received` is called after each received layer with the number received so far; `keep_alive` is open while
    layers are built. The replicas of the old
    shape are not changed: other workers may need them, and so may a rollback.
    """
    plan = Plan.from_text(epoch.plan)
    awaited = {layer for move in epoch.layer_moves if move.target == slot for layer in move.layers}
    replicas: dict[int, StageReplica] = {}
    received = 0
    for stage in plan.stages_of(slot):
        with keep_alive():
            replica = await build_replica(
                clock,
                worker_state.job,
                epoch.segments,
                plan.stages,
                stage,
                worker_state.device,
                epoch.committed_steps,
                epoch.layer_inputs,
            )
        snapshot = Snapshot()
        for layer in replica.state.layers:
            if layer in awaited:
                snapshot.update(unpack_snapshot(await transport.receive(_layer_key(epoch, layer))))
                received += 1
                on_layer_received(received)
            else:
                snapshot.update(_held_layer(worker_state, layer, epoch.committed_steps))
        replica.state.restore(snapshot)
        replicas[stage] = replica
    return replicas


def _held_layer(worker_state: WorkerState, layer: int, version: int) -> Snapshot:
    state = worker_state.find_layer_state(layer, version)
    assert state is not None, f"layer {layer} is not held here for step {version}"
    return state.snapshot_layer(layer)


def _layer_key(epoch: Epoch, layer: int) -> FrameKey:
    return FrameKey(epoch.number, epoch.committed_steps, f"layer {layer}")
