"""`culm.gnn.train`: train a model on a graph, return the weights and the summary of the run."""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from culm.gnn.gnn_request import GnnRequest, parse_mode
from culm.gnn.gnn_run import GnnCallbacks, RunOutcome, run_training
from culm.gnn.graph.graph_readers import to_graph
from culm.gnn.launch import make_launcher
from culm.gnn.launch.launcher import Launcher
from culm.gnn.leader.gnn_ledger import Evaluation
from culm.gnn.model.gnn_model import GnnModel, check_integer, pyg_state_dict, resolve_model, round_up_to_heads
from culm.gnn.model.pass_steps import Place
from culm.gnn.server.gnn_run_store import resolve_etcd_access
from culm.gnn.server.weight_stash import Adam

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from culm.cluster.store.etcd import EtcdAccess
    from culm.runtime.compute.snapshot import Snapshot

__all__ = ["GnnCallbacks", "GnnResult", "train"]
T = TypeVar("T")
Runner = Callable[[Coroutine[Any, Any, RunOutcome]], RunOutcome]
_DEFAULT_WIDTH_AND_HEADS = {"gcn": (16, 1), "gat": (64, 8)}
"""Default hidden width and number of heads, by model kind."""


@dataclass(frozen=True)
class GnnResult:
    """Result of a run. `weights` belong to the training epoch with the best validation accuracy, `final_weights` to
    the last one; both have PyG's parameter names."""

    model: GnnModel
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
        """Return a torch_geometric.nn.GCN or .GAT with `weights` loaded."""
        nn = importlib.import_module("torch_geometric.nn")
        shape = self.model
        options: dict[str, Any] = {"heads": shape.heads} if shape.kind == "gat" else {}
        hidden = shape.widths[1] if shape.layers > 1 else shape.widths[-1]
        kind = nn.GCN if shape.kind == "gcn" else nn.GAT
        module: Any = kind(shape.widths[0], hidden, shape.layers, shape.widths[-1], dropout=shape.dropout, **options)
        module.load_state_dict(self.weights)
        for conv in module.convs if shape.kind == "gat" else ():
            conv.dropout = shape.attention_dropout
        return cast("Module", module)


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
    etcd: str | EtcdAccess | None = None,
    suspect_after: float = 10.0,
    dash: bool = False,
    symmetrize: bool = False,
    split_seed: int = 0,
    out: str | Path | None = None,
    callbacks: GnnCallbacks | None = None,
    runner: Runner | None = None,
    **graph_arrays: Any,
) -> GnnResult:
    """Train a model on a whole graph, with graph servers, parameter servers and elastic workers as processes.

    `graph`: a culm.gnn.Graph, a path to an npz file, `gen:...`, a PyG Data, a SciPy sparse matrix or an edge list. The
        last two also need `features`, `labels` and `train`, `val`, `test` (masks or vertex numbers) as keyword
        arguments.
    `model`: "gcn", "gat", a culm.gnn.GnnModel, or a GCN or GAT of PyG, whose shape and weights are used.
    `init`: a state dict with PyG's names to start from.
    `normalize`: divide each feature row by its sum. Default: only for graphs read from a file, whose features are
        usually counts or flags.
    `dropout` applies to the input of every layer; `input_dropout` replaces it for the first layer; `attention_dropout`
        applies to the edges of a gat (default: as `dropout`, as in PyG).
    `lookahead`: a pass that starts with stale weights (async with staleness) computes with the weights predicted for
        the time when its gradients are applied.
    `patience`: stop after this many evaluations without a better validation accuracy; 0 means never.

    `launcher`: local, ray, lambda (with options, see culm.gnn.launch), or a Launcher object.
    `host`: the address under which workers reach this machine.
    `share`: workers on this machine read the tables of graph servers in shared memory, and rows are not sent.
    `edges`: where apply edge runs, "worker" or "server" (default: by the number of edges).
    `etcd`: URLs or a culm.cluster.store.etcd.EtcdAccess of the store that servers use (default: a private etcd on this
        machine).
    `suspect_after`: seconds after which a server that hangs is replaced.
    `dash`: serve a page with the progress of the run on loopback.
    `kills`: processes to kill on purpose, as in "worker epoch=5", "server=1 epoch=9" or "chaos workers=100 servers=5".
    `runner`: runs the coroutine of the run to its end (default: asyncio.run, in a thread of its own if the caller
        already has a running loop).

    Raises UsageError for an invalid request, before any process is started, and RunError if the run fails. No process
    is left running in either case.
    """
    graph_data = to_graph(graph, symmetrize=symmetrize, split_seed=split_seed, **graph_arrays)
    from_pyg = not isinstance(model, (str, GnnModel))
    if normalize if normalize is not None else (isinstance(graph, (str, Path)) and not from_pyg):
        graph_data = graph_data.with_normalized_features()
    default_hidden, default_heads = _DEFAULT_WIDTH_AND_HEADS.get(model if isinstance(model, str) else "", (16, 1))
    heads = default_heads if heads is None else heads
    check_integer("heads", heads)
    shape = resolve_model(
        model,
        width=graph_data.width,
        classes=graph_data.classes,
        layers=layers,
        hidden=round_up_to_heads(default_hidden, heads) if hidden is None else hidden,
        heads=heads,
        dropout=dropout,
        input_dropout=input_dropout,
        attention_dropout=attention_dropout,
    )
    if from_pyg and init is None:
        init = model.state_dict()
    out = None if out is None else str(out)
    request = GnnRequest(
        graph=graph_data,
        model=shape,
        adam=Adam(lr=lr, weight_decay=weight_decay),
        epochs=epochs,
        seed=seed,
        init=init,
        mode=parse_mode(mode),
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
        etcd=resolve_etcd_access(etcd),
        suspect_after=suspect_after,
        dash=dash,
        out=out,
    )
    request.check()
    worker_launcher = make_launcher(launcher) if isinstance(launcher, str) else launcher
    return _build_result(
        (runner or _run_to_completion)(run_training(request, worker_launcher, callbacks or GnnCallbacks())), out
    )


def _build_result(outcome: RunOutcome, out: str | None) -> GnnResult:
    results, ledger = outcome.results, outcome.results.ledger
    return GnnResult(
        model=outcome.config.model,
        summary=outcome.summary,
        losses=[ledger.losses[e] for e in sorted(ledger.losses)],
        evaluations=[ledger.evaluations[e] for e in sorted(ledger.evaluations)],
        weights=_pyg_weights(results.best_state or results.final_state),
        final_weights=_pyg_weights(results.final_state),
        folder=out,
    )


def _pyg_weights(state: Mapping[int, Snapshot]) -> dict[str, Tensor]:
    return pyg_state_dict({layer: snapshot.parameters for layer, snapshot in state.items()})


def _run_to_completion(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result. Uses a thread if this thread already has a running loop (a
    notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome_box: list[T | BaseException] = []

    def run_in_thread() -> None:
        try:
            outcome_box.append(asyncio.run(coroutine))
        except BaseException as error:
            outcome_box.append(error)

    thread = threading.Thread(target=run_in_thread)
    thread.start()
    thread.join()
    outcome = outcome_box[0]
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
