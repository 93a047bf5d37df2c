"""The systems that culm.gnn is compared with, each training in processes of its own.

    pyg-edges    torch_geometric, the whole graph in one process with a thread per core, edge index
    pyg-sparse   the same with a sparse matrix
    sampled-ddp  mini-batches of sampled neighbourhoods, one process per core, gradients averaged by DDP over Gloo

PyG's NeighborLoader needs pyg-lib or torch-sparse, which have no wheels for every torch version that culm supports. The
sampler here is minimal but fair: vectorised draws from a CSR, its subgraph layout, the same PyG model. An epoch is a
training epoch.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import torch
from benchmarks.gnn.training_case import GraphCase, TrainingCurve, TrainingRequest
from torch import nn

from culm.gnn.graph.csr_graph import TEST, TRAIN, VAL, Graph
from culm.gnn.graph.graph_readers import load
from culm.gnn.model.gnn_model import initial_weights, model_from_pyg, pyg_state_dict

NumpyArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def pyg_model(case: GraphCase, features: int, classes: int) -> nn.Module:
    """Return the model as users of PyG write it."""
    pyg: Any = importlib.import_module("torch_geometric.nn")
    shape = {
        "in_channels": features,
        "hidden_channels": case.hidden,
        "num_layers": case.layers,
        "out_channels": classes,
        "dropout": case.dropout,
    }
    if case.model == "gat":
        return cast(nn.Module, pyg.GAT(**shape, heads=case.heads))
    return cast(nn.Module, pyg.GCN(**shape))


def load_graph(case: GraphCase) -> Graph:
    """Return the graph as culm trains on it: feature rows of a file, which are counts or flags, are divided by their
    sum."""
    graph = load(case.graph, split_seed=case.split_seed)
    return graph if case.graph.startswith("gen:") else graph.with_normalized_features()


def graph_edge_index(graph: Graph) -> torch.Tensor:
    targets = np.repeat(np.arange(graph.vertices), graph.degrees)
    return torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), targets]))


def train_whole_graph(request: TrainingRequest) -> TrainingCurve:
    """Train on the full graph in this process, from the same initial weights as culm with this seed."""
    torch.set_num_threads(request.cores)
    graph, case = load_graph(request.case), request.case
    torch.manual_seed(request.seed)
    model = pyg_model(case, graph.width, graph.classes)
    model.load_state_dict(pyg_state_dict(initial_weights(model_from_pyg(model), request.seed, None)))
    optimizer = torch.optim.Adam(model.parameters(), lr=case.lr, weight_decay=case.weight_decay)
    features, labels, edges = (
        torch.from_numpy(graph.features),
        torch.from_numpy(graph.labels).long(),
        graph_edge_index(graph),
    )
    adjacency = _sparse_adjacency(edges, graph.vertices) if request.system == "pyg-sparse" else edges
    train = torch.from_numpy(graph.roles == TRAIN)

    def epoch(_: int) -> None:
        model.train()
        optimizer.zero_grad()
        inputs = nn.functional.dropout(features, case.input_dropout) if case.input_dropout else features
        nn.functional.cross_entropy(model(inputs, adjacency)[train], labels[train]).backward()
        optimizer.step()

    return time_epochs(
        case.epochs, epoch, lambda: evaluate_accuracy(model, features, adjacency, graph), request.evaluate_every or 1
    )


def _sparse_adjacency(edges: torch.Tensor, vertices: int) -> torch.Tensor:
    utils: Any = importlib.import_module("torch_geometric.utils")
    return cast(torch.Tensor, utils.to_torch_csr_tensor(edges.flip(0), size=(vertices, vertices)))


def time_epochs(
    epochs: int, epoch: Callable[[int], None], evaluate: Callable[[], tuple[float, float]], every: int = 1
) -> TrainingCurve:
    """Run and time the epochs. Evaluations, after every `every` epochs and after the last, are not timed."""
    seconds, accuracies, now = [], [], (0.0, 0.0)
    for number in range(epochs):
        start = time.perf_counter()
        epoch(number)
        seconds.append(time.perf_counter() - start)
        now = evaluate() if (number + 1) % every == 0 or number + 1 == epochs else now
        accuracies.append(now)
    return TrainingCurve(tuple(seconds), tuple(val for val, _ in accuracies), tuple(test for _, test in accuracies))


@torch.no_grad()
def evaluate_accuracy(
    model: nn.Module, features: torch.Tensor, edges: torch.Tensor, graph: Graph
) -> tuple[float, float]:
    """Return validation and test accuracy on the whole graph."""
    model.eval()
    correct = (model(features, edges).argmax(1) == torch.from_numpy(graph.labels)).numpy()
    return float(correct[graph.roles == VAL].mean()), float(correct[graph.roles == TEST].mean())


class NeighbourSampler:
    """Samples neighbourhoods of mini-batches: up to `fanout` neighbours per hop, all if there are no more."""

    def __init__(self, graph: Graph, fanout: int, hops: int, rng: np.random.Generator) -> None:
        self._indptr, self._indices = np.asarray(graph.indptr, np.int64), np.asarray(graph.indices, np.int64)
        self._fanout, self._hops, self._rng = fanout, hops, rng
        self._place = np.full(graph.vertices, -1, np.int64)

    def sample_subgraph(self, seeds: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
        """Return the vertices of the sampled subgraph, the seeds first, and its edges (source, target) as positions
        in that list."""
        known, frontier, edges = [seeds], seeds, []
        self._place[seeds] = np.arange(len(seeds))
        count = len(seeds)
        for _ in range(self._hops):
            sources, targets = self._sample_neighbours(frontier)
            frontier = np.unique(sources[self._place[sources] < 0])
            self._place[frontier] = np.arange(count, count + len(frontier))
            count += len(frontier)
            known.append(frontier)
            edges.append(np.stack([self._place[sources], self._place[targets]]))
        vertices = np.concatenate(known)
        self._place[vertices] = -1
        return vertices, np.concatenate(edges, axis=1)

    def _sample_neighbours(self, vertices: NumpyArray) -> tuple[NumpyArray, NumpyArray]:
        """Sample one hop: return sources and targets. A draw may repeat a neighbour, which keeps the draws
        vectorised."""
        first, degree = self._indptr[vertices], self._indptr[vertices + 1] - self._indptr[vertices]
        takes_all = degree <= self._fanout
        counts = np.where(takes_all, degree, self._fanout)
        targets = np.repeat(vertices, counts)
        offset = np.arange(len(targets)) - np.repeat(np.cumsum(counts) - counts, counts)
        drawn = (self._rng.random(len(targets)) * np.repeat(degree, counts)).astype(np.int64)
        return self._indices[np.repeat(first, counts) + np.where(np.repeat(takes_all, counts), offset, drawn)], targets


def train_sampled(request: TrainingRequest) -> TrainingCurve:
    """Train on mini-batches in `cores` processes."""
    importlib.import_module("torch_geometric.nn")  # imported before the fork, once for all processes
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            train_sampled_rank, (request, folder), nprocs=request.cores, start_method="fork"
        )
        return msgspec.json.decode((Path(folder) / "curve").read_bytes(), type=TrainingCurve)


def train_sampled_rank(rank: int, request: TrainingRequest, folder: str) -> None:
    """Run one process. Rank 0 evaluates and writes the curve into the folder."""
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=request.cores)
    graph, case = load_graph(request.case), request.case
    torch.manual_seed(request.seed)
    model = nn.parallel.DistributedDataParallel(pyg_model(case, graph.width, graph.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=case.lr, weight_decay=case.weight_decay)
    sampler = NeighbourSampler(graph, case.fanout, case.layers, np.random.default_rng((request.seed, rank)))
    features, labels = torch.from_numpy(graph.features), torch.from_numpy(graph.labels).long()

    def epoch(number: int) -> None:
        model.train()
        for seeds in rank_batches(graph, request, number, rank):
            vertices, edges = sampler.sample_subgraph(seeds)
            out = model(features[torch.from_numpy(vertices)], torch.from_numpy(edges))[: len(seeds)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(out, labels[torch.from_numpy(seeds)]).backward()
            optimizer.step()
        distributed.barrier()

    edge_index = graph_edge_index(graph)
    evaluate = (
        (lambda: evaluate_accuracy(model.module, features, edge_index, graph)) if rank == 0 else (lambda: (0.0, 0.0))
    )
    curve = time_epochs(case.epochs, epoch, lambda: _evaluate_in_step(evaluate))
    if rank == 0:
        (Path(folder) / "curve").write_bytes(msgspec.json.encode(curve))
    os._exit(0)  # destroying DDP joins Gloo's threads with the GIL held, which occasionally deadlocks


def _evaluate_in_step(evaluate: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Evaluate while all ranks wait: a rank that started the next epoch would be timed as waiting."""
    from torch import distributed

    accuracy = evaluate()
    distributed.barrier()
    return accuracy


def rank_batches(graph: Graph, request: TrainingRequest, epoch: int, rank: int) -> list[NumpyArray]:
    """Return this rank's batches of an epoch: every training vertex once, the same number of batches on every rank."""
    train = np.flatnonzero(graph.roles == TRAIN)
    order = np.random.default_rng((request.seed, epoch)).permutation(train)
    own = np.array_split(order, request.cores)[rank]
    steps = max(1, min(-(-len(train) // request.case.batch), len(train) // request.cores))
    return list(np.array_split(own, steps))
