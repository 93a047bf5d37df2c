"""`culm.gnn.train`: a graph and a model in, a trained model and the figures of the run out."""

from __future__ import annotations

import asyncio
import importlib
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from culm.checkpoint.storage import Storage
from culm.cluster.store import MemoryStore, StoreServer
from culm.errors import UsageError
from culm.gnn import faults, prepare
from culm.gnn.board import MODES, Mode
from culm.gnn.desk import Desk
from culm.gnn.launch import launcher as launchers
from culm.gnn.launch.base import Launcher, Ticket
from culm.gnn.launch.local import LocalLauncher
from culm.gnn.lead import Leader
from culm.gnn.ledger import Epoch, Evaluation
from culm.gnn.model import Model, initial_weights, model_of, state_dict
from culm.gnn.page import page
from culm.gnn.price import prices_of
from culm.gnn.readers import as_graph
from culm.gnn.setup import Setup
from culm.gnn.shelf import Adam
from culm.gnn.summary import summarise
from culm.gnn.tune import Tuner
from culm.observe.folder import RunFolder, claim, vacant
from culm.transport.sockets import SocketTransport

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from culm.gnn.graph import Graph
    from culm.gnn.lead import Findings

T = TypeVar("T")
SERVERS = "culm.gnn.host:serve"
_FOREVER_S = 30 * 24 * 3600.0
_TUNE_S = 0.25
_KIND_DEFAULTS = {"gcn": (16, 1), "gat": (64, 8)}
"""Hidden width and heads."""


@dataclass(frozen=True)
class Result:
    """What a run came to. `weights` are those of the epoch that validation chose, under PyG's names."""

    model: Model
    summary: dict[str, Any]
    losses: list[float]
    evaluations: list[Evaluation]
    weights: dict[str, Tensor]
    final_weights: dict[str, Tensor]
    folder: str | None = None

    @property
    def test_accuracy(self) -> float:
        return float(self.summary["test_accuracy"])

    @property
    def val_accuracy(self) -> float:
        return float(self.summary["val_accuracy"])

    def to_pyg(self) -> Module:
        """A torch_geometric.nn.GCN or .GAT with the weights loaded."""
        nn = importlib.import_module("torch_geometric.nn")
        shape = self.model
        options: dict[str, Any] = {"heads": shape.heads} if shape.kind == "gat" else {}
        hidden = shape.widths[1] if shape.layers > 1 else shape.widths[-1]
        kind = nn.GCN if shape.kind == "gcn" else nn.GAT
        made: Module = kind(shape.widths[0], hidden, shape.layers, shape.widths[-1], dropout=shape.dropout, **options)
        made.load_state_dict(self.weights)
        return made


@dataclass
class Watcher:
    """What is told of a run while it goes: override what is of interest."""

    told: Callable[[str], None] = field(default=lambda _: None)
    prepared: Callable[[Setup, Any], None] = field(default=lambda *_: None)
    epoch: Callable[[Epoch, float], None] = field(default=lambda *_: None)
    evaluated: Callable[[Evaluation], None] = field(default=lambda _: None)


def train(
    graph: Any,
    model: Any = "gcn",
    *,
    layers: int = 2,
    hidden: int | None = None,
    heads: int | None = None,
    dropout: float = 0.5,
    input_dropout: float | None = None,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
    epochs: int = 200,
    seed: int = 0,
    init: Mapping[str, Tensor] | None = None,
    normalize: bool | None = None,
    mode: str = "sync",
    staleness: int = 0,
    servers: int = 1,
    parameter_servers: int = 1,
    workers: int | str = "auto",
    intervals: int | None = None,
    threads: int | None = None,
    launcher: str | Launcher = "local",
    worker_seconds: float = 900.0,
    host: str = "127.0.0.1",
    share: bool = True,
    latency_s: float = 0.0,
    evaluate_every: int = 10,
    patience: int = 0,
    checkpoint_every: int = 10,
    kills: Sequence[str] = (),
    instance: str = "c5n.2xlarge",
    symmetrize: bool = False,
    split_seed: int = 0,
    out: str | None = None,
    watcher: Watcher | None = None,
    **parts: Any,
) -> Result:
    """Train a model on a whole graph, with graph servers, parameter servers and elastic workers as processes.

    `graph`: a culm.gnn.Graph, a path to an npz, `gen:...`, a PyG Data, a SciPy sparse matrix or an edge list; the last
    two take `features`, `labels` and `train`, `val`, `test` (masks or vertex numbers) beside it.
    `model`: "gcn", "gat", a culm.gnn.Model, or a GCN or GAT of PyG, whose shape and weights are taken over.
    `init`: a state dict with PyG's names to start from. `normalize`: divide feature rows by their sum (default: for
    graphs from a file, where they are counts or flags). `dropout` is on the input of every layer, `input_dropout`
    replaces it for the first. `patience`: evaluations without a better validation accuracy before it stops; 0: never.
    `launcher`: local, ray, lambda (with options: see culm.gnn.launch), or one of your own. `host`: the address of this
    machine under which workers reach it. `share`: workers on this machine read tables in place, no rows are sent.
    `kills`: processes to end on purpose, as in "worker epoch=5", "server=1 epoch=9" or "chaos workers=100 servers=5".

    Raises UsageError for a wrong request, before anything is started, and RunError when the run fails. Nothing is left
    running in either case.
    """
    found = as_graph(graph, symmetrize=symmetrize, split_seed=split_seed, **parts)
    pyg = not isinstance(model, (str, Model))
    if normalize if normalize is not None else (isinstance(graph, (str, Path)) and not pyg):
        found = found.normalised()
    default_hidden, default_heads = _KIND_DEFAULTS.get(model if isinstance(model, str) else "", (16, 1))
    shape = model_of(
        model,
        width=found.width,
        classes=found.classes,
        layers=layers,
        hidden=default_hidden if hidden is None else hidden,
        heads=default_heads if heads is None else heads,
        dropout=dropout,
        input_dropout=input_dropout,
    )
    if pyg and init is None:
        init = model.state_dict()
    wanted = _Wanted(
        graph=found,
        model=shape,
        adam=Adam(lr=lr, weight_decay=weight_decay),
        epochs=epochs,
        seed=seed,
        init=init,
        mode=_mode(mode),
        staleness=staleness,
        servers=servers,
        parameter_servers=parameter_servers,
        workers=workers,
        intervals=intervals,
        threads=threads,
        worker_seconds=worker_seconds,
        host=host,
        share=share,
        latency_s=latency_s,
        evaluate_every=evaluate_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        kills=tuple(kills),
        instance=instance,
        out=out,
    )
    wanted.check()
    started = launchers(launcher) if isinstance(launcher, str) else launcher
    return _anywhere(lambda: _train(wanted, started, watcher or Watcher()))


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A request, checked."""

    graph: Graph
    model: Model
    adam: Adam
    epochs: int
    seed: int
    init: Mapping[str, Tensor] | None
    mode: Mode
    staleness: int
    servers: int
    parameter_servers: int
    workers: int | str
    intervals: int | None
    threads: int | None
    worker_seconds: float
    host: str
    share: bool
    latency_s: float
    evaluate_every: int
    patience: int
    checkpoint_every: int
    kills: tuple[str, ...]
    instance: str
    out: str | None

    def check(self) -> None:
        least = {"epochs": 1, "staleness": 0, "servers": 1, "parameter_servers": 1, "patience": 0, "latency_s": 0}
        least |= {"evaluate_every": 1, "checkpoint_every": 1}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give at least {low}")
        if self.staleness and self.mode != "async":
            raise UsageError(f"--staleness {self.staleness} with --mode {self.mode}: only async reads stale rows")
        if self.servers > self.graph.vertices:
            raise UsageError(
                f"--servers {self.servers} for {self.graph.vertices} vertices: a server needs at least one, use fewer"
            )
        if self.workers != "auto" and (not isinstance(self.workers, int) or self.workers < 1):
            raise UsageError(f"--workers {self.workers!r}: give a number of at least 1, or auto")
        for kill in self.kills:
            faults.parse(kill, self.servers, self.parameter_servers, self.epochs)
        initial_weights(self.model, self.seed, self.init)
        if self.out is not None:
            vacant(self.out)
        prices_of().machine(self.instance)
        prepare.check_memory(self.graph, self.model)

    @property
    def first_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else prepare.cores()


def _mode(given: str) -> Mode:
    for mode in MODES:
        if mode == given:
            return mode
    raise UsageError(f"--mode {given!r}: there are {', '.join(MODES)}")


def _anywhere(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end, also where a loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    box: list[T | BaseException] = []

    def aside() -> None:
        try:
            box.append(asyncio.run(work()))
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=aside)
    thread.start()
    thread.join()
    found = box[0]
    if isinstance(found, BaseException):
        raise found
    return found


async def _train(wanted: _Wanted, workers: Launcher, watcher: Watcher) -> Result:
    servers = LocalLauncher(entry=SERVERS)
    servers.warm()  # they import while the graph is cut
    if isinstance(workers, LocalLauncher):
        workers.warm()
    if wanted.out is not None:
        claim(wanted.out)
    folder = RunFolder(wanted.out)
    with tempfile.TemporaryDirectory(prefix="culm-gnn-") as scratch:
        try:
            folder.open()
            return await _Run(wanted, watcher, folder, Path(scratch), workers, servers).go()
        finally:
            await asyncio.gather(workers.close(), servers.close())
            folder.close()


class _Run:
    """One run: everything that lives in the process that started it."""

    def __init__(
        self, wanted: _Wanted, watcher: Watcher, folder: RunFolder, scratch: Path, workers: Launcher, servers: Launcher
    ) -> None:
        self._wanted, self._watcher, self._folder = wanted, watcher, folder
        self._workers, self._servers = workers, servers
        self._scratch = scratch
        self._run, self._token = secrets.token_hex(6), secrets.token_hex(24)
        self._began = time.monotonic()
        self._started = self._began
        self._written = -1
        self._events: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []

    async def go(self) -> Result:
        setup, intervals = await asyncio.to_thread(self._prepare)
        self._watcher.prepared(setup, self._wanted.graph)
        transport = SocketTransport(secret=self._token.encode())
        store = MemoryStore()
        serving = asyncio.create_task(StoreServer(store, transport).serve())
        host, _, port = transport.address.rpartition(":")
        ticket = Ticket(self._run, self._token, host, int(port), _FOREVER_S)
        first = self._wanted.first_workers
        desk = Desk(self._run, self._token, self._workers, first, seconds=self._wanted.worker_seconds, told=self._event)
        leader = Leader(
            setup, store.client("leader"), desk, self._servers, ticket,
            intervals=intervals, patience=self._wanted.patience, latency_s=self._wanted.latency_s,
            told=self._event, epoch=self._epoch, evaluated=self._evaluated,
        )  # fmt: skip
        try:
            findings = await self._lead(leader, desk, intervals)
            await desk.close()
        finally:
            serving.cancel()
            await transport.close()
        return self._result(setup, findings, desk, intervals)

    async def _lead(self, leader: Leader, desk: Desk, intervals: int) -> Findings:
        """The leader, and beside it whoever must go on while it does; the first to fail ends all."""
        beside = [asyncio.create_task(desk.supply())]
        if self._wanted.workers == "auto":
            beside.append(asyncio.create_task(self._tune(leader, desk, intervals)))
        if self._wanted.kills:
            beside.append(asyncio.create_task(self._kill(leader, desk)))
        leading = asyncio.create_task(leader.run())
        try:
            done, _ = await asyncio.wait([leading, *beside], return_when=asyncio.FIRST_COMPLETED)
            while leading not in done:
                for task in done:
                    task.result()  # raises what went wrong
                beside = [task for task in beside if task not in done]
                done, _ = await asyncio.wait([leading, *beside], return_when=asyncio.FIRST_COMPLETED)
            return leading.result()
        finally:
            for task in [leading, *beside]:
                task.cancel()
            await asyncio.gather(leading, *beside, return_exceptions=True)

    async def _tune(self, leader: Leader, desk: Desk, intervals: int) -> None:
        wanted = self._wanted
        tuner = Tuner(low=1, high=max(prepare.cores(), 1) * 4, workers=desk.target)
        tuner.high = min(tuner.high, wanted.servers * intervals)
        while True:
            await asyncio.sleep(_TUNE_S)
            ledger = leader.found.ledger
            why = tuner.look(ledger.now_of("queue"), ledger.now_of("running")) if ledger.losses else None
            if why is not None:
                desk.target = tuner.workers
                self._event(kind="autotune", workers=tuner.workers, why=why)

    async def _kill(self, leader: Leader, desk: Desk) -> None:
        wanted = self._wanted
        kills = [
            k
            for text in wanted.kills
            for k in faults.parse(text, wanted.servers, wanted.parameter_servers, wanted.epochs, wanted.seed)
        ]
        await faults.inject(kills, leader, desk, self._event, wanted.seed)

    def _prepare(self) -> tuple[Setup, int]:
        wanted = self._wanted
        self._watcher.told("cutting the graph")
        parts = self._scratch / "parts"
        parts.mkdir()
        checkpoints = self._folder.checkpoints or str(self._scratch / "checkpoints")
        count = wanted.intervals or prepare.default_intervals(
            wanted.graph.vertices, wanted.servers, wanted.first_workers, wanted.mode
        )
        intervals = prepare.write_parts(wanted.graph, wanted.model, wanted.servers, count, parts)
        prepare.write_initial(initial_weights(wanted.model, wanted.seed, wanted.init), checkpoints)
        setup = Setup(
            run=self._run,
            model=wanted.model,
            seed=wanted.seed,
            adam=wanted.adam,
            mode=wanted.mode,
            staleness=wanted.staleness,
            epochs=wanted.epochs,
            evaluate_every=wanted.evaluate_every,
            checkpoint_every=wanted.checkpoint_every,
            servers=wanted.servers,
            parameter_servers=min(wanted.parameter_servers, wanted.model.layers),
            total=wanted.graph.train_vertices,
            parts=str(parts),
            checkpoints=checkpoints,
            threads=wanted.threads or max(1, prepare.cores() // wanted.servers),
            host=wanted.host,
            share=wanted.share,
        )
        self._watcher.told("starting servers and workers")
        return setup, intervals

    def _event(self, **fields: Any) -> None:
        event = {"t": round(time.monotonic() - self._began, 4), **fields}
        self._events.append(event)
        self._folder.event(**event)

    def _epoch(self, done: Epoch) -> None:
        """Complete for the first time, or again after a loss: a line stands there once."""
        now = time.monotonic()
        if self._written < 0:
            self._started = now
        if done.epoch > self._written:
            self._written = done.epoch
            at = round(now - self._began, 4)
            line = {"step": done.epoch, "loss": done.loss, "samples": self._wanted.graph.train_vertices, "t": at}
            self._steps.append(line)
            self._folder.step(**line)
            self._watcher.epoch(done, now - self._began)

    def _evaluated(self, evaluation: Evaluation) -> None:
        self._event(kind="evaluation", **evaluation._asdict())
        self._watcher.evaluated(evaluation)

    def _result(self, setup: Setup, findings: Findings, desk: Desk, intervals: int) -> Result:
        wanted, ledger = self._wanted, findings.ledger
        summary = summarise(
            setup, findings, desk, wanted.graph, intervals,
            launcher=self._workers.name, instance=wanted.instance, wall_s=time.monotonic() - self._began,
        )  # fmt: skip
        self._folder.write("summary.json", summary)
        if wanted.out is not None:
            Storage(wanted.out).write("report.html", page(summary, self._events, self._steps).encode())
        epochs = sorted(ledger.losses)
        return Result(
            model=setup.model,
            summary=summary,
            losses=[ledger.losses[e] for e in epochs],
            evaluations=[ledger.evaluations[e] for e in sorted(ledger.evaluations)],
            weights=state_dict(findings.best or findings.weights),
            final_weights=state_dict(findings.weights),
            folder=wanted.out,
        )
