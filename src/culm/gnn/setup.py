"""What every process of a run has to know, and the keys under which they agree on the rest.

setup                   this, once
seats/SEAT              who sits on it: graph-0, graph-1, ..., parameter-0, ...; ends with the process
generation              what everyone trains under
members/NUMBER/SEAT     addresses in a generation
saved/SEAT              versions of the weights that a parameter server has on storage, and where
report/SEAT             what a graph server has to tell: losses, counts, queues
permit                  (generation, passes below this number may run, passes in all)
broken/NUMBER           a connection of this generation broke: everyone starts over
result                  the end
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from culm.gnn.board import Mode
from culm.gnn.model import Model
from culm.gnn.program import Place
from culm.gnn.shelf import Adam

T = TypeVar("T")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    run: str
    model: Model
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
    total: int
    """Training vertices."""
    parts: str
    """Folder with the parts of the graph."""
    checkpoints: str
    threads: int
    """Of a graph server."""
    in_flight: int = 2
    """Tasks that a worker has at a time, at least: one is computed while the rows of the next travel."""
    host: str = "127.0.0.1"
    edges: Place = "worker"
    """Who applies edges."""
    share: bool = True
    """Workers on the same machine map the tables of servers."""

    @property
    def looks_ahead(self) -> bool:
        """Whether a pass computes with the weights that its gradients will meet; without staleness it has them."""
        return self.lookahead and self.staleness > 0

    @property
    def seats(self) -> tuple[str, ...]:
        return (*self.graph_seats, *self.parameter_seats)

    @property
    def graph_seats(self) -> tuple[str, ...]:
        return tuple(f"graph-{i}" for i in range(self.servers))

    @property
    def parameter_seats(self) -> tuple[str, ...]:
        return tuple(f"parameter-{i}" for i in range(self.parameter_servers))

    def home(self, layer: int) -> int:
        """The parameter server of a layer."""
        return layer % self.parameter_servers


class Generation(msgspec.Struct, frozen=True):
    """Everyone trains under one of these; a lost server replaces it by the next."""

    number: int
    version: int
    """Of the weights that it starts from: the newest that every parameter server has saved."""
    start: int
    """The first pass."""
    sources: tuple[str, ...]
    """Where each parameter server finds that version."""


class Permit(msgspec.Struct, frozen=True):
    generation: int
    until: int
    """Passes below this number may run."""
    passes: int
    """And no pass from this number on ever will."""


class Report(msgspec.Struct, frozen=True):
    """A graph server to whoever leads."""

    generation: int
    server: int
    losses: dict[int, tuple[float, int]]
    """By epoch: sum of the losses, and over how many training vertices."""
    evaluations: dict[int, tuple[int, ...]]
    """By epoch: right and all of training, validation, test."""
    ended: dict[int, float]
    """By pass: when its last interval finished it, on the clock that all processes of a machine share."""
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


class Member(msgspec.Struct, frozen=True):
    seat: str
    address: str
    pid: int


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes, kind: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=kind)
