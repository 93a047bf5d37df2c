"""Graph neural networks on whole graphs, after Dorylus: graph servers hold the graph, parameter servers hold the
weights, elastic workers run the dense tasks, and asynchrony is bounded.

Packages, in order of their imports; each one imports only from those above it:

    graph/       the Graph, its readers and generators, METIS partitions with ghosts and intervals
    model/       GCN and GAT; the steps of a pass; the dense kernels (apply vertex, apply edge); dropout
    scheduler/   pure: which step of which interval may run now, under sync, pipe or async
    transport/   messages, sockets that carry tensors, tables in shared memory
    launch/      launchers of elastic workers: local processes, Ray, AWS Lambda
    server/      graph server and parameter server processes, their records in the store, weight stashing
    worker/      the elastic worker process, the pool that keeps enough of them, the autoscaler
    leader/      the leader: generations, recoveries, the ledger of losses and accuracies, injected kills
    plan/        time and cost of a run before anything is rented; prices

Above the packages: `gnn_request` checks a request, `run_preparation` writes parts and initial weights, `gnn_run` runs
the training, `gnn_summary` builds summary.json, and `train_gnn` is `culm.gnn.train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from culm.gnn.graph.csr_graph import Graph
    from culm.gnn.graph.graph_readers import load
    from culm.gnn.model.gnn_model import GnnModel
    from culm.gnn.train_gnn import GnnCallbacks, GnnResult, train

__all__ = ["GnnCallbacks", "GnnModel", "GnnResult", "Graph", "load", "train"]
_MODULE_BY_NAME = {
    "Graph": "graph.csr_graph",
    "GnnModel": "model.gnn_model",
    "load": "graph.graph_readers",
    "GnnResult": "train_gnn",
    "GnnCallbacks": "train_gnn",
    "train": "train_gnn",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `--help` and plans start without torch and sockets."""
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'culm.gnn' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"culm.gnn.{_MODULE_BY_NAME[name]}"), name)
