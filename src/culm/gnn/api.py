"""`culm.gnn.train`: a graph and a model in, a trained model and the figures of the run out."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from culm.gnn.launch import launcher as launchers
from culm.gnn.launch.base import Launcher
from culm.gnn.ledger import Evaluation
from culm.gnn.meeting import access_of
from culm.gnn.model import Model, check_whole, model_of, multiple, state_dict
from culm.gnn.program import Place
from culm.gnn.readers import as_graph
from culm.gnn.request import Request, mode_of
from culm.gnn.running import Outcome, Watcher, run
from culm.gnn.shelf import Adam

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from culm.cluster.etcd import Access
    from culm.runtime.state import Snapshot

__all__ = ["Result", "Watcher", "train"]
T = TypeVar("T")
Runner = Callable[[Coroutine[Any, Any, Outcome]], Outcome]
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
        made: Any = kind(shape.widths[0], hidden, shape.layers, shape.widths[-1], dropout=shape.dropout, **options)
        made.load_state_dict(self.weights)
        for conv in made.convs if shape.kind == "gat" else ():
            conv.dropout = shape.attention_dropout
        return cast("Module", made)


def train(
    graph: Any,
    model: Any = "gcn",
    *,
    layers: int = 2,
    hidden: int | None = None,
    heads: int | None = None,
    dropout: float = 0.5,
    input_dropout: float | None = None,
    attention_dropout: float | None = None,
    lr: float = 0.01,
    weight_decay: float = 5e-4,
    epochs: int = 200,
    seed: int = 0,
    init: Mapping[str, Tensor] | None = None,
    normalize: bool | None = None,
    mode: str = "sync",
    staleness: int = 0,
    lookahead: bool = True,
    servers: int = 1,
    parameter_servers: int = 1,
    workers: int | str = "auto",
    intervals: int | None = None,
    threads: int | None = None,
    launcher: str | Launcher = "local",
    worker_seconds: float = 900.0,
    host: str = "127.0.0.1",
    share: bool = True,
    edges: Place | None = None,
    latency_s: float = 0.0,
    evaluate_every: int = 10,
    patience: int = 0,
    checkpoint_every: int = 10,
    kills: str | Sequence[str] = (),
    instance: str = "c5n.2xlarge",
    etcd: str | Access | None = None,
    suspect_after: float = 10.0,
    dash: bool = False,
    symmetrize: bool = False,
    split_seed: int = 0,
    out: str | Path | None = None,
    watcher: Watcher | None = None,
    runner: Runner | None = None,
    **parts: Any,
) -> Result:
    """Train a model on a whole graph, with graph servers, parameter servers and elastic workers as processes.

    `graph`: a culm.gnn.Graph, a path to an npz, `gen:...`, a PyG Data, a SciPy sparse matrix or an edge list; the last
    two take `features`, `labels` and `train`, `val`, `test` (masks or vertex numbers) beside it.
    `model`: "gcn", "gat", a culm.gnn.Model, or a GCN or GAT of PyG, whose shape and weights are taken over.
    `init`: a state dict with PyG's names to start from. `normalize`: divide feature rows by their sum (default: for
    graphs from a file, where they are counts or flags). `dropout` is on the input of every layer, `input_dropout`
    replaces it for the first; `attention_dropout` is that of a gat's edges (default: as `dropout`, as in PyG).
    `lookahead`: passes that begin with old weights (async with staleness) compute with those that are expected when
    their gradients arrive. `patience`: evaluations without a better validation accuracy before it stops; 0: never.
    `launcher`: local, ray, lambda (with options: see culm.gnn.launch), or one of your own. `host`: the address of this
    machine under which workers reach it. `share`: workers on this machine read tables in place, no rows are sent.
    `edges`: who applies attention to edges, worker or server (default: by their number).
    `etcd`: where servers meet, URLs or a culm.cluster.etcd.Access (default: a private one of this machine);
    `suspect_after`: seconds after which a server that hangs is replaced. `dash`: show the run on loopback as it goes.
    `kills`: processes to end on purpose, as in "worker epoch=5", "server=1 epoch=9" or "chaos workers=100 servers=5".
    `runner`: what brings the run to its end, as asyncio.run does (default: that, aside where a loop runs already).

    Raises UsageError for a wrong request, before anything is started, and RunError when the run fails. Nothing is left
    running in either case.
    """
    found = as_graph(graph, symmetrize=symmetrize, split_seed=split_seed, **parts)
    pyg = not isinstance(model, (str, Model))
    if normalize if normalize is not None else (isinstance(graph, (str, Path)) and not pyg):
        found = found.normalised()
    default_hidden, default_heads = _KIND_DEFAULTS.get(model if isinstance(model, str) else "", (16, 1))
    heads = default_heads if heads is None else heads
    check_whole("heads", heads)
    shape = model_of(
        model,
        width=found.width,
        classes=found.classes,
        layers=layers,
        hidden=multiple(default_hidden, heads) if hidden is None else hidden,
        heads=heads,
        dropout=dropout,
        input_dropout=input_dropout,
        attention_dropout=attention_dropout,
    )
    if pyg and init is None:
        init = model.state_dict()
    out = None if out is None else str(out)
    wanted = Request(
        graph=found,
        model=shape,
        adam=Adam(lr=lr, weight_decay=weight_decay),
        epochs=epochs,
        seed=seed,
        init=init,
        mode=mode_of(mode),
        staleness=staleness,
        lookahead=lookahead,
        servers=servers,
        parameter_servers=parameter_servers,
        workers=workers,
        intervals=intervals,
        threads=threads,
        worker_seconds=worker_seconds,
        host=host,
        share=share,
        edges=edges,
        latency_s=latency_s,
        evaluate_every=evaluate_every,
        patience=patience,
        checkpoint_every=checkpoint_every,
        kills=(kills,) if isinstance(kills, str) else tuple(kills),
        instance=instance,
        etcd=access_of(etcd),
        suspect_after=suspect_after,
        dash=dash,
        out=out,
    )
    wanted.check()
    started = launchers(launcher) if isinstance(launcher, str) else launcher
    return _result((runner or _anywhere)(run(wanted, started, watcher or Watcher())), out)


def _result(outcome: Outcome, out: str | None) -> Result:
    findings, ledger = outcome.findings, outcome.findings.ledger
    return Result(
        model=outcome.setup.model,
        summary=outcome.summary,
        losses=[ledger.losses[e] for e in sorted(ledger.losses)],
        evaluations=[ledger.evaluations[e] for e in sorted(ledger.evaluations)],
        weights=_weights(findings.best or findings.state),
        final_weights=_weights(findings.state),
        folder=out,
    )


def _weights(state: Mapping[int, Snapshot]) -> dict[str, Tensor]:
    return state_dict({layer: own.parameters for layer, own in state.items()})


def _anywhere(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also where a loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: list[T | BaseException] = []

    def aside() -> None:
        try:
            box.append(asyncio.run(work))
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=aside)
    thread.start()
    thread.join()
    found = box[0]
    if isinstance(found, BaseException):
        raise found
    return found
