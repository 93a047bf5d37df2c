"""Records in the store of a run, and their keys.

    setup                 GnnRunConfig, written once by the leader
    servers/ID            process id of the server with that id (graph-0, ..., parameter-0, ...); ends with its session
    generation            Generation: where all servers start from
    members/NUMBER/ID     ServerMember: address of a server in a generation
    saved/ID              versions of the weights that a parameter server has saved, and their files
    report/ID             GraphServerReport: losses, counts, queues
    permit                PassPermit: the passes that may run
    broken/NUMBER         a connection of this generation broke: start the next generation

Epochs are training epochs. A generation is a configuration of servers, which a lost server ends.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from culm.gnn.model.gnn_model import GnnModel
from culm.gnn.model.pass_steps import Place
from culm.gnn.scheduler.interval_scheduler import Mode
from culm.gnn.server.weight_stash import Adam

T = TypeVar("T")


class GnnRunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one run."""

    run: str
    model: GnnModel
    seed: int
    adam: Adam
    mode: Mode
    staleness: int
    lookahead: bool
    epochs: int
    evaluate_every: int
    checkpoint_every: int
    servers: int
    parameter_servers: int
    train_vertices: int
    """Training vertices of the whole graph."""
    parts_folder: str
    """Folder with the parts of the graph."""
    checkpoints: str
    threads: int
    """Threads of a graph server."""
    tasks_per_worker: int = 2
    """Minimum tasks of a worker at a time: one is computed while the rows of the next are in transit."""
    host: str = "127.0.0.1"
    edge_place: Place = "worker"
    """Where apply edge runs."""
    share_tables: bool = True
    """Workers on the same machine map the tables of graph servers."""

    @property
    def predicts_weights(self) -> bool:
        """Whether a pass computes with the weights predicted for its update. Without staleness it already has them."""
        return self.lookahead and self.staleness > 0

    @property
    def server_ids(self) -> tuple[str, ...]:
        return (*self.graph_server_ids, *self.parameter_server_ids)

    @property
    def graph_server_ids(self) -> tuple[str, ...]:
        return tuple(f"graph-{i}" for i in range(self.servers))

    @property
    def parameter_server_ids(self) -> tuple[str, ...]:
        return tuple(f"parameter-{i}" for i in range(self.parameter_servers))

    def parameter_server_of(self, layer: int) -> int:
        """Return the number of the parameter server that holds a layer."""
        return layer % self.parameter_servers


class Generation(msgspec.Struct, frozen=True):
    """A period with a fixed set of servers. A lost server ends it and starts the next one."""

    number: int
    version: int
    """Version of the weights to start from: the newest that every parameter server has saved."""
    start_pass: int
    """The first pass to run."""
    checkpoint_names: tuple[str, ...]
    """The file of that version, for each parameter server."""


class PassPermit(msgspec.Struct, frozen=True):
    generation: int
    permitted_passes: int
    """Passes below this number may run."""
    total_passes: int
    """Passes from this number on will never run."""


class GraphServerReport(msgspec.Struct, frozen=True):
    """Report of a graph server to the leader."""

    generation: int
    server: int
    losses: dict[int, tuple[float, int]]
    """By epoch: the sum of the losses and its number of training vertices."""
    evaluations: dict[int, tuple[int, ...]]
    """By epoch: correct and total, for train, val and test vertices."""
    pass_end_times: dict[int, float]
    """By pass: when its last interval finished it, on the monotonic clock of the machine."""
    queue: int
    running: int
    workers: int
    spread: int
    relaunches: int
    refused: int
    """Results that came too late to count."""
    worker_seconds: float
    worker_tasks: int
    finished: bool


class ServerMember(msgspec.Struct, frozen=True):
    server_id: str
    address: str
    pid: int


def pack_record(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack_record(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)
