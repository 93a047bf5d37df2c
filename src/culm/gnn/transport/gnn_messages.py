"""Messages between servers, workers, the worker pool and the leader. Tensors follow a message as raw bytes; nothing
is pickled.

`epoch` is a training epoch; `generation` numbers the configurations of servers.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from culm.gnn.model.gnn_model import GnnModel
from culm.gnn.transport.shared_tables import SharedTableLayout

GradientNames = tuple[tuple[int, str], ...]
"""(layer, parameter) of each gradient tensor that follows, in order."""


class ServerAddresses(msgspec.Struct, frozen=True, tag="server_addresses"):
    """Worker pool to worker: the servers to connect to in this generation, and the model."""

    generation: int
    graph_servers: tuple[str, ...]
    parameter_servers: tuple[str, ...]
    model: GnnModel
    seed: int
    train_vertices: int
    """Training vertices of the whole graph."""
    latency_s: float = 0.0
    """Delay added to every task, to emulate a distant worker."""


class WorkerHeartbeat(msgspec.Struct, frozen=True, tag="worker_heartbeat"):
    """Worker to worker pool, on connecting and every few seconds. A worker that stays silent is replaced."""

    pid: int
    host: str


class StopWorker(msgspec.Struct, frozen=True, tag="stop_worker"):
    """Worker pool to worker: the run has ended, or there are too many workers. The worker finishes its tasks and
    exits."""


class WorkerAccepted(msgspec.Struct, frozen=True, tag="worker_accepted"):
    """Graph server to worker: the layout of its shared tables, for workers that can map them."""

    server: int
    layout: SharedTableLayout | None


class WorkerReady(msgspec.Struct, frozen=True, tag="worker_ready"):
    """Worker to graph server: ready for tasks. `maps_tables`: the worker reads rows in shared memory, so they need
    not be sent."""

    maps_tables: bool


class WorkerLeaving(msgspec.Struct, frozen=True, tag="worker_leaving"):
    """Worker to graph server: no new tasks, please; assigned ones will be finished."""


class TaskAssignment(msgspec.Struct, frozen=True, tag="task_assignment"):
    """Graph server to worker: one task. The rows of `slices` follow, unless the worker maps the tables."""

    task: tuple[int, int, int]
    graph_pass: tuple[int, int, bool]
    step: tuple[str, int, bool]
    versions: dict[int, int]
    slices: tuple[tuple[str, int, int], ...]
    forward_kept: bool
    """The worker should still have the forward cache. If not, it refuses the task, which is then sent again with all
    inputs."""
    follow_up: TaskAssignment | None = None
    """The task to continue with once its weights are available; its rows follow those of this task."""


class TaskDone(msgspec.Struct, frozen=True, tag="task_done"):
    """Worker to graph server: the result of a task. Rows come first (if `has_rows`), then the gradients in
    `gradient_names`."""

    task: tuple[int, int, int]
    has_rows: bool
    gradient_names: GradientNames
    loss: float
    counts: tuple[int, ...]
    compute_s: float
    """Seconds of computing."""
    waited_s: float
    """Seconds that the task waited at the worker before."""
    forward_kept: bool


class TaskRefused(msgspec.Struct, frozen=True, tag="task_refused"):
    """Worker to graph server: the forward cache of this task is gone."""

    task: tuple[int, int, int]


class ScatteredRows(msgspec.Struct, frozen=True, tag="scattered_rows"):
    """Graph server to graph server: the rows that an interval scatters."""

    pass_number: int
    layer: int
    backward: bool
    interval: int


class SlowestPass(msgspec.Struct, frozen=True, tag="slowest_pass"):
    """Graph server to graph server: the pass of its slowest interval."""

    pass_number: int


class ServerGradient(msgspec.Struct, frozen=True, tag="server_gradient"):
    """Graph server to parameter server: the gradient summed over all its intervals, each counted once."""

    epoch: int
    layer: int
    server: int
    intervals: int
    names: tuple[str, ...]


class OldestNeededVersion(msgspec.Struct, frozen=True, tag="oldest_needed_version"):
    """Graph server to parameter server: this server will request no older version of the layer."""

    server: int
    layer: int
    version: int


class NewVersion(msgspec.Struct, frozen=True, tag="new_version"):
    """Parameter server to graph server: a new version exists. Its bias follows, and the expected update of the bias
    if weights are predicted."""

    layer: int
    version: int


class PullWeights(msgspec.Struct, frozen=True, tag="pull_weights"):
    """To a parameter server: send this version, and every newer one when it exists."""

    layer: int
    version: int


class WeightVersion(msgspec.Struct, frozen=True, tag="weight_version"):
    """Parameter server to worker: a version of the weights. The expected updates follow if weights are predicted."""

    layer: int
    version: int
    names: tuple[str, ...]


class FetchParameterState(msgspec.Struct, frozen=True, tag="fetch_parameter_state"):
    """Leader to parameter server: send the newest state of all layers."""


class ParameterState(msgspec.Struct, frozen=True, tag="parameter_state"):
    """Parameter server to leader: weights of one layer, followed by the optimizer's moments."""

    layer: int
    weights: tuple[str, ...]
    moments: tuple[str, ...]


GnnMessage: TypeAlias = (
    ServerAddresses
    | WorkerHeartbeat
    | StopWorker
    | WorkerAccepted
    | WorkerReady
    | WorkerLeaving
    | TaskAssignment
    | TaskDone
    | TaskRefused
    | ScatteredRows
    | SlowestPass
    | ServerGradient
    | OldestNeededVersion
    | NewVersion
    | PullWeights
    | WeightVersion
    | FetchParameterState
    | ParameterState
)
encode_message = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(GnnMessage).decode
