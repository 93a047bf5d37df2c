"""What servers and workers say to each other. Tensors travel beside a message, as raw bytes; nothing is pickled."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from culm.gnn.arena import Layout
from culm.gnn.model import Model

Named = tuple[tuple[int, str], ...]
"""(layer, parameter) of each tensor that comes along, in order."""


class Roster(msgspec.Struct, frozen=True, tag="roster"):
    """The desk to a worker: whom to call in this generation, and what is trained."""

    generation: int
    graph: tuple[str, ...]
    parameter: tuple[str, ...]
    model: Model
    seed: int
    total: int
    """Training vertices of the whole graph."""
    latency_s: float = 0.0
    """Added to every task, to see what a far worker would do."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker to the desk, at first and every few seconds: one that is silent for long is replaced."""

    pid: int
    host: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The desk to a worker: the run has ended, or fewer are enough. It finishes what it has and goes."""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """A graph server to a worker: where its tables are, for whoever can map them."""

    server: int
    layout: Layout | None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A worker to a graph server: it takes tasks. `mapped`: rows need not be sent along."""

    mapped: bool


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """A worker to a graph server: no more tasks; what it has, it finishes."""


class Work(msgspec.Struct, frozen=True, tag="work"):
    """A graph server to a worker: one task. Rows of `pieces` come along unless they are mapped."""

    task: tuple[int, int, int]
    now: tuple[int, int, bool]
    step: tuple[str, int, bool]
    versions: dict[int, int]
    pieces: tuple[tuple[str, int, int], ...]
    kept: bool
    """The worker has kept what its forward left; without it the task is refused and comes again with everything."""
    then: Work | None = None
    """What to go on with afterwards, when its weights are there; its rows come along behind those of this one."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A worker to a graph server: rows first (if there are any), then the gradients that `named` says."""

    task: tuple[int, int, int]
    rows: bool
    named: Named
    loss: float
    counts: tuple[int, ...]
    seconds: float
    """Of computing."""
    waited: float
    """Seconds that it lay at the worker before."""
    kept: bool


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """A worker to a graph server: what it should have kept is gone."""

    task: tuple[int, int, int]


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """A graph server to another: what an interval scatters."""

    number: int
    layer: int
    back: bool
    interval: int


class Slow(msgspec.Struct, frozen=True, tag="slow"):
    """A graph server to another: the pass in which its slowest interval is."""

    number: int


class Gradient(msgspec.Struct, frozen=True, tag="gradient"):
    """A graph server to a parameter server: the sum over all its intervals, each counted once."""

    epoch: int
    layer: int
    server: int
    intervals: int
    names: tuple[str, ...]


class Oldest(msgspec.Struct, frozen=True, tag="oldest"):
    """A graph server to a parameter server: no older version of a layer will be asked for from here."""

    server: int
    layer: int
    version: int


class Version(msgspec.Struct, frozen=True, tag="version"):
    """A parameter server to a graph server: a new version is there. Its bias comes along, and the step it may take."""

    layer: int
    version: int


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """To a parameter server: send a version, and every newer one as it comes."""

    layer: int
    version: int


class Weights(msgspec.Struct, frozen=True, tag="weights"):
    """A parameter server to a worker. Where one looks ahead, expected steps follow the weights."""

    layer: int
    version: int
    names: tuple[str, ...]


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Whoever leads to a parameter server: send the newest state of all layers."""


class State(msgspec.Struct, frozen=True, tag="state"):
    """The answer, for one layer: weights, and after them the moments of the optimizer."""

    layer: int
    weights: tuple[str, ...]
    moments: tuple[str, ...]


Message: TypeAlias = (
    Roster | Hello | Stop | Welcome | Ready | Leaving | Work | Done | Refuse | Rows | Slow
    | Gradient | Oldest | Version | Pull | Weights | Fetch | State
)  # fmt: skip
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode
