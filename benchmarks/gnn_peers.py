"""The systems that culm.gnn is compared with, each training in processes of its own.

pyg-edges    torch_geometric, the whole graph in one process with as many threads as there are cores, edge index
pyg-sparse   the same over a sparse matrix
sampled-ddp  mini-batches of sampled neighbourhoods, one process a core, gradients averaged by DDP over Gloo

PyG's NeighborLoader needs pyg-lib or torch-sparse, of which there are no wheels for every torch that culm runs with.
The sampler here is the smallest honest one: vectorised draws out of a CSR, its subgraph layout, the same PyG model.
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
from torch import nn

from benchmarks.gnn_case import Case, Curve, Request
from culm.gnn.graph import TEST, TRAIN, VAL, Graph
from culm.gnn.model import initial_weights, shape_of, state_dict
from culm.gnn.readers import load

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def pyg_model(case: Case, features: int, classes: int) -> nn.Module:
    """The model as PyG's users write it."""
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


def read(case: Case) -> Graph:
    """The graph as culm trains on it: rows of a file's features, which are counts or flags, sum to one."""
    graph = load(case.graph, split_seed=case.split_seed)
    return graph if case.graph.startswith("gen:") else graph.normalised()


def edge_index(graph: Graph) -> torch.Tensor:
    targets = np.repeat(np.arange(graph.vertices), graph.degrees)
    return torch.from_numpy(np.stack([np.asarray(graph.indices, np.int64), targets]))


def whole_graph(request: Request) -> Curve:
    """Full-graph training in this process, from the weights that culm starts from with this seed."""
    torch.set_num_threads(request.cores)
    graph, case = read(request.case), request.case
    torch.manual_seed(request.seed)
    model = pyg_model(case, graph.width, graph.classes)
    model.load_state_dict(state_dict(initial_weights(shape_of(model), request.seed, None)))
    optimizer = torch.optim.Adam(model.parameters(), lr=case.lr, weight_decay=case.weight_decay)
    features, labels, edges = torch.from_numpy(graph.features), torch.from_numpy(graph.labels).long(), edge_index(graph)
    over = _sparse(edges, graph.vertices) if request.system == "pyg-sparse" else edges
    train = torch.from_numpy(graph.roles == TRAIN)

    def epoch(_: int) -> None:
        model.train()
        optimizer.zero_grad()
        given = nn.functional.dropout(features, case.input_dropout) if case.input_dropout else features
        nn.functional.cross_entropy(model(given, over)[train], labels[train]).backward()
        optimizer.step()

    return curve(case.epochs, epoch, lambda: accuracies(model, features, over, graph), request.every or 1)


def _sparse(edges: torch.Tensor, vertices: int) -> torch.Tensor:
    utils: Any = importlib.import_module("torch_geometric.utils")
    return cast(torch.Tensor, utils.to_torch_csr_tensor(edges.flip(0), size=(vertices, vertices)))


def curve(epochs: int, epoch: Callable[[int], None], judge: Callable[[], tuple[float, float]], every: int = 1) -> Curve:
    """Run and time the epochs; judging, after every so many and after the last, does not count."""
    seconds, judged, now = [], [], (0.0, 0.0)
    for number in range(epochs):
        start = time.perf_counter()
        epoch(number)
        seconds.append(time.perf_counter() - start)
        now = judge() if (number + 1) % every == 0 or number + 1 == epochs else now
        judged.append(now)
    return Curve(tuple(seconds), tuple(val for val, _ in judged), tuple(test for _, test in judged))


@torch.no_grad()
def accuracies(model: nn.Module, features: torch.Tensor, edges: torch.Tensor, graph: Graph) -> tuple[float, float]:
    """On validation and test vertices, over the whole graph."""
    model.eval()
    right = (model(features, edges).argmax(1) == torch.from_numpy(graph.labels)).numpy()
    return float(right[graph.roles == VAL].mean()), float(right[graph.roles == TEST].mean())


class Sampler:
    """Neighbourhoods of mini-batches: up to `fanout` neighbours a hop, all where there are no more."""

    def __init__(self, graph: Graph, fanout: int, hops: int, rng: np.random.Generator) -> None:
        self._indptr, self._indices = np.asarray(graph.indptr, np.int64), np.asarray(graph.indices, np.int64)
        self._fanout, self._hops, self._rng = fanout, hops, rng
        self._place = np.full(graph.vertices, -1, np.int64)

    def around(self, seeds: Array) -> tuple[Array, Array]:
        """Vertices of the sampled subgraph, the seeds first, and its edges (source, target) as places in that list."""
        known, frontier, edges = [seeds], seeds, []
        self._place[seeds] = np.arange(len(seeds))
        count = len(seeds)
        for _ in range(self._hops):
            sources, targets = self._drawn(frontier)
            frontier = np.unique(sources[self._place[sources] < 0])
            self._place[frontier] = np.arange(count, count + len(frontier))
            count += len(frontier)
            known.append(frontier)
            edges.append(np.stack([self._place[sources], self._place[targets]]))
        vertices = np.concatenate(known)
        self._place[vertices] = -1
        return vertices, np.concatenate(edges, axis=1)

    def _drawn(self, vertices: Array) -> tuple[Array, Array]:
        """One hop: sources and targets. Draws out of many neighbours may repeat one, which keeps them vectorised."""
        first, degree = self._indptr[vertices], self._indptr[vertices + 1] - self._indptr[vertices]
        few = degree <= self._fanout
        counts = np.where(few, degree, self._fanout)
        targets = np.repeat(vertices, counts)
        nth = np.arange(len(targets)) - np.repeat(np.cumsum(counts) - counts, counts)
        drawn = (self._rng.random(len(targets)) * np.repeat(degree, counts)).astype(np.int64)
        return self._indices[np.repeat(first, counts) + np.where(np.repeat(few, counts), nth, drawn)], targets


def sampled(request: Request) -> Curve:
    """Mini-batches over `cores` processes."""
    importlib.import_module("torch_geometric.nn")  # once: forked processes have it then
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(sampled_rank, (request, folder), nprocs=request.cores, start_method="fork")
        return msgspec.json.decode((Path(folder) / "curve").read_bytes(), type=Curve)


def sampled_rank(rank: int, request: Request, folder: str) -> None:
    """One of the processes; the first judges, and leaves the curve in the folder."""
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=request.cores)
    graph, case = read(request.case), request.case
    torch.manual_seed(request.seed)
    model = nn.parallel.DistributedDataParallel(pyg_model(case, graph.width, graph.classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=case.lr, weight_decay=case.weight_decay)
    sampler = Sampler(graph, case.fanout, case.layers, np.random.default_rng((request.seed, rank)))
    features, labels = torch.from_numpy(graph.features), torch.from_numpy(graph.labels).long()

    def epoch(number: int) -> None:
        model.train()
        for seeds in batches(graph, request, number, rank):
            vertices, edges = sampler.around(seeds)
            out = model(features[torch.from_numpy(vertices)], torch.from_numpy(edges))[: len(seeds)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(out, labels[torch.from_numpy(seeds)]).backward()
            optimizer.step()
        distributed.barrier()

    everything = edge_index(graph)
    judge = (lambda: accuracies(model.module, features, everything, graph)) if rank == 0 else (lambda: (0.0, 0.0))
    found = curve(case.epochs, epoch, lambda: _together(judge))
    if rank == 0:
        (Path(folder) / "curve").write_bytes(msgspec.json.encode(found))
    os._exit(0)  # to take DDP apart would join Gloo's threads with the interpreter's lock held: now and then for ever


def _together(judge: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Nobody starts the next epoch while the first judges: it would be timed as waiting."""
    from torch import distributed

    found = judge()
    distributed.barrier()
    return found


def batches(graph: Graph, request: Request, epoch: int, rank: int) -> list[Array]:
    """This process's share of an epoch: every training vertex once, the same number of batches for everyone."""
    train = np.flatnonzero(graph.roles == TRAIN)
    order = np.random.default_rng((request.seed, epoch)).permutation(train)
    mine = np.array_split(order, request.cores)[rank]
    steps = max(1, min(-(-len(train) // request.case.batch), len(train) // request.cores))
    return list(np.array_split(mine, steps))
