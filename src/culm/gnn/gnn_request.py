"""A request for a training run, checked before any process is started."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.cluster.timeouts import derive_timeouts
from culm.errors import UsageError
from culm.gnn import run_preparation
from culm.gnn.graph.csr_graph import VAL
from culm.gnn.graph.graph_partition import check_metis
from culm.gnn.leader import server_kill_injection
from culm.gnn.model.gnn_model import check_integer, initial_weights
from culm.gnn.plan.gnn_prices import prices_for_year
from culm.gnn.scheduler.interval_scheduler import MODES, Mode
from culm.observe.writers.run_folder import check_folder_empty

if TYPE_CHECKING:
    from torch import Tensor

    from culm.cluster.store.etcd import EtcdAccess
    from culm.gnn.graph.csr_graph import Graph
    from culm.gnn.model.gnn_model import GnnModel
    from culm.gnn.model.pass_steps import Place
    from culm.gnn.server.weight_stash import Adam


_FIELDS_IN_SECONDS = ("latency_s", "worker_seconds")
_MAXIMA = {"threads": 1024, "workers": 10_000}
_MAX_COUNT = 10**7
"""Upper bound of counts such as epochs: every server keeps the list of all passes in memory."""
_SEED_LIMIT = 1 << 63


@dataclass(frozen=True, kw_only=True)
class GnnRequest:
    """All options of one run, under the names of `culm.gnn.train`."""

    graph: Graph
    model: GnnModel
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
    etcd: EtcdAccess | None
    suspect_after: float
    dash: bool
    out: str | None

    def check(self) -> None:
        """Raise UsageError for the first field with a value that cannot be used."""
        self._check_counts()
        check_integer("seed", self.seed)
        if not -_SEED_LIMIT <= self.seed < _SEED_LIMIT:
            raise UsageError(f"--seed is {self.seed}: give a number of up to 63 bits")
        _check_host(self.host)
        for name, value in (("lr", self.adam.lr), ("weight_decay", self.adam.weight_decay)):
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"--{name.replace('_', '-')} is {value:g}: give a number of at least 0")
        if self.staleness and self.mode != "async":
            raise UsageError(f"--staleness {self.staleness} with --mode {self.mode}: only async reads stale rows")
        if self.patience and not (self.graph.roles == VAL).any():
            raise UsageError(f"--patience {self.patience} without validation vertices: give some, or use 0")
        if self.servers > self.graph.vertices:
            raise UsageError(
                f"--servers {self.servers} for {self.graph.vertices} vertices: a server needs at least one, use fewer"
            )
        if self.servers > 1:
            check_metis(self.graph.vertices, self.graph.edges, self.servers)
        if self.workers != "auto" and (type(self.workers) is not int or self.workers < 1):
            raise UsageError(f"--workers {self.workers!r}: give a number of at least 1, or auto")
        if self.initial_workers > _MAXIMA["workers"]:
            raise UsageError(f"--workers {self.workers}: give at most {_MAXIMA['workers']}")
        if self.edges not in (None, "worker", "server"):
            raise UsageError(f"edges is {self.edges!r}: give worker or server, or omit it to choose by size")
        for kill in self.kills:
            server_kill_injection.parse_kills(kill, self.servers, self.parameter_server_count, self.epochs)
        run_preparation.check_memory(self.graph, self.model)
        initial_weights(self.model, self.seed, self.init)
        if self.out is not None:
            check_folder_empty(self.out, resumable=False)
        prices_for_year().machine(self.instance)
        derive_timeouts(self.suspect_after)

    def _check_counts(self) -> None:
        minima = {"epochs": 1, "staleness": 0, "servers": 1, "parameter_servers": 1, "patience": 0, "latency_s": 0}
        minima |= {"evaluate_every": 1, "checkpoint_every": 1, "intervals": 1, "threads": 1, "worker_seconds": 5}
        for name, minimum in minima.items():
            value, maximum = getattr(self, name), _MAXIMA.get(name, _MAX_COUNT)
            if value is None:
                continue
            if name not in _FIELDS_IN_SECONDS:
                check_integer(name, value)
            if not minimum <= value <= maximum:
                bound = f"at most {maximum}" if maximum < value < math.inf else f"at least {minimum}"
                raise UsageError(f"--{name.removesuffix('_s').replace('_', '-')} is {value}: give {bound}")

    @property
    def parameter_server_count(self) -> int:
        """Parameter servers that the run starts: at most one per layer, since one without a layer would be idle."""
        return min(self.parameter_servers, self.model.layers)

    @property
    def initial_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else run_preparation.available_cores()


def _check_host(host: str) -> None:
    """Raise UsageError if the host name does not resolve. Otherwise every server would fail later, one after
    another."""
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--host {host!r} cannot be resolved ({error}): give the address of this machine") from None


def parse_mode(name: str) -> Mode:
    """Return the mode of that name. Raises UsageError for an unknown name."""
    for mode in MODES:
        if mode == name:
            return mode
    raise UsageError(f"--mode {name!r}: use {', '.join(MODES)}")
