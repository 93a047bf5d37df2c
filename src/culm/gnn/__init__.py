"""Graph networks on whole graphs: graph servers own the graph, elastic workers compute, asynchrony is bounded.

From the ground up; a file imports only from files above it:

    sparse                              sums over neighbours
    arrays, graph, memory, generate, readers
                                        a graph to learn on, from files, generators, other libraries
    partition, files                    cut by METIS into parts with ghosts and intervals; parts as files
    model, dropout, program             GCN and GAT; what is left out; a pass as a list of steps
    few, dense, compute                 the arithmetic: rows of mostly zeros; AV and AE; one task from inputs to result
    passes, queues, hands, pins, board  pure: passes over the graph, and what of them may run now
    seats, tally, shelf, lookahead      pure: who gets it, sums counted once, versions of weights
    arena, shard                        a server's tables, mapped by local workers
    messages, link                      what is said, and how: raw frames behind the run's token
    setup, notes, host, crew, server, parameters
                                        server processes: a seat, and what is done on it in a generation
    worker, desk, tune, launch/         elastic workers: the process, where it calls first, how many, where from
    ledger, findings, fetch, lead, faults
                                        whoever leads: reports, weights, generations, permits, kills on purpose
    price, summary, plan/               money, figures, plans
    request, cutter, running, api       `culm.gnn.train`; METIS in a process of its own
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from culm.gnn.api import Result, Watcher, train
    from culm.gnn.graph import Graph
    from culm.gnn.model import Model
    from culm.gnn.readers import load

__all__ = ["Graph", "Model", "Result", "Watcher", "load", "train"]
_HOMES = {
    "Graph": "graph",
    "Model": "model",
    "load": "readers",
    "Result": "api",
    "Watcher": "api",
    "train": "api",
}


def __getattr__(name: str) -> Any:
    """Torch and sockets come with the first use: help and plans start in a blink."""
    if name not in _HOMES:
        raise AttributeError(f"module 'culm.gnn' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"culm.gnn.{_HOMES[name]}"), name)
