"""What was asked for, checked before anything is started."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.cluster.timeouts import derive
from culm.errors import UsageError
from culm.gnn import faults, prepare
from culm.gnn.board import MODES, Mode
from culm.gnn.graph import VAL
from culm.gnn.model import check_whole, initial_weights
from culm.gnn.partition import check_metis
from culm.gnn.price import prices_of
from culm.observe.folder import vacant

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.etcd import Access
    from culm.gnn.graph import Graph
    from culm.gnn.model import Model
    from culm.gnn.program import Place
    from culm.gnn.shelf import Adam


_SECONDS = ("latency_s", "worker_seconds")
_MOST = {"threads": 1024, "workers": 10_000}
_MOST_OF_ANYTHING = 10**7
"""Every server lists the passes of a run."""
_SEEDS = 1 << 63


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run, in the words of `culm.gnn.train`."""

    graph: Graph
    model: Model
    adam: Adam
    epochs: int
    seed: int
    init: Mapping[str, Tensor] | None
    mode: Mode
    staleness: int
    lookahead: bool
    servers: int
    parameter_servers: int
    workers: int | str
    intervals: int | None
    threads: int | None
    worker_seconds: float
    host: str
    share: bool
    edges: Place | None
    latency_s: float
    evaluate_every: int
    patience: int
    checkpoint_every: int
    kills: tuple[str, ...]
    instance: str
    etcd: Access | None
    suspect_after: float
    dash: bool
    out: str | None

    def check(self) -> None:
        """Raises UsageError for what can not be."""
        self._check_counts()
        check_whole("seed", self.seed)
        if not -_SEEDS <= self.seed < _SEEDS:
            raise UsageError(f"--seed is {self.seed}: give a number of up to 63 bits")
        _check_host(self.host)
        for name, given in (("lr", self.adam.lr), ("weight_decay", self.adam.weight_decay)):
            if not (math.isfinite(given) and given >= 0):
                raise UsageError(f"--{name.replace('_', '-')} is {given:g}: give a number of at least 0")
        if self.staleness and self.mode != "async":
            raise UsageError(f"--staleness {self.staleness} with --mode {self.mode}: only async reads stale rows")
        if self.patience and not (self.graph.roles == VAL).any():
            raise UsageError(f"--patience {self.patience} without a vertex to validate on: name some, or give 0")
        if self.servers > self.graph.vertices:
            raise UsageError(
                f"--servers {self.servers} for {self.graph.vertices} vertices: a server needs at least one, use fewer"
            )
        if self.servers > 1:
            check_metis()
        if self.workers != "auto" and (type(self.workers) is not int or self.workers < 1):
            raise UsageError(f"--workers {self.workers!r}: give a number of at least 1, or auto")
        if self.first_workers > _MOST["workers"]:
            raise UsageError(f"--workers {self.workers}: give at most {_MOST['workers']}")
        if self.edges not in (None, "worker", "server"):
            raise UsageError(f"edges is {self.edges!r}: give worker or server, or nothing to decide by size")
        for kill in self.kills:
            faults.parse(kill, self.servers, self.parameter_seats, self.epochs)
        prepare.check_memory(self.graph, self.model)
        initial_weights(self.model, self.seed, self.init)
        if self.out is not None:
            vacant(self.out, resumable=False)
        prices_of().machine(self.instance)
        derive(self.suspect_after)

    def _check_counts(self) -> None:
        least = {"epochs": 1, "staleness": 0, "servers": 1, "parameter_servers": 1, "patience": 0, "latency_s": 0}
        least |= {"evaluate_every": 1, "checkpoint_every": 1, "intervals": 1, "threads": 1, "worker_seconds": 5}
        for name, low in least.items():
            given, most = getattr(self, name), _MOST.get(name, _MOST_OF_ANYTHING)
            if given is None:
                continue
            if name not in _SECONDS:
                check_whole(name, given)
            if not low <= given <= most:
                bound = f"at most {most}" if most < given < math.inf else f"at least {low}"
                raise UsageError(f"--{name.removesuffix('_s').replace('_', '-')} is {given}: give {bound}")

    @property
    def parameter_seats(self) -> int:
        """Parameter servers that there will be: one without a layer would have nothing to do."""
        return min(self.parameter_servers, self.model.layers)

    @property
    def first_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else prepare.cores()


def _check_host(host: str) -> None:
    """A name that nobody knows would be found out by servers that can not call each other, one after the other."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host!r} is not known ({error}): give the address of this machine") from None


def mode_of(given: str) -> Mode:
    """The mode of that name. Raises UsageError if there is none."""
    for mode in MODES:
        if mode == given:
            return mode
    raise UsageError(f"--mode {given!r}: there are {', '.join(MODES)}")
