"""A whole run in one process: boards, shards and a shelf, with chance deciding who is next. No sockets, no clocks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from culm.gnn.board import Board, Mode
from culm.gnn.compute import Kernel
from culm.gnn.dense import Kept
from culm.gnn.generate import generate
from culm.gnn.graph import Graph
from culm.gnn.lookahead import Stashed
from culm.gnn.model import Model, initial_weights
from culm.gnn.partition import cut, owners
from culm.gnn.passes import Task, passes
from culm.gnn.prepare import source_rows
from culm.gnn.program import Place, gradients_of, walk
from culm.gnn.shard import Shard
from culm.gnn.shelf import Adam, Shelf
from culm.gnn.tally import Tally


def small_graph(seed: int = 0) -> Graph:
    return generate(f"gen:sbm,vertices=90,classes=3,degree=6,features=7,seed={seed}")


def small_model(graph: Graph, kind: str = "gcn", *, layers: int = 2, hidden: int = 6, dropout: float = 0.0) -> Model:
    widths = (graph.width, *[hidden] * (layers - 1), graph.classes)
    heads = 2 if kind == "gat" else 1
    return Model(kind=kind, widths=widths, heads=heads, dropout=dropout, input_dropout=dropout)  # type: ignore[arg-type]


@dataclass
class Trace:
    """What a simulated run came to."""

    losses: dict[int, float] = field(default_factory=dict)
    counted: dict[tuple[int, int, int, str], int] = field(default_factory=dict)
    """By epoch, server, interval and step: how often a gradient was added."""
    spreads: list[int] = field(default_factory=list)
    """Passes between the fastest and the slowest interval of all servers, whenever something was gathered."""
    ages: list[int] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    kept_versions: int = 0
    _losses: dict[int, list[float]] = field(default_factory=dict)

    def add_loss(self, epoch: int, share: float) -> None:
        """Of an interval; in whatever order they come, the sum is the same."""
        self._losses.setdefault(epoch, []).append(share)
        self.losses[epoch] = math.fsum(self._losses[epoch])


class House:
    """Graph servers and a parameter server. `repeat`: the chance that a finished task is done a second time."""

    def __init__(
        self,
        graph: Graph,
        model: Model,
        *,
        servers: int = 2,
        intervals: int = 3,
        mode: Mode = "sync",
        staleness: int = 0,
        epochs: int = 5,
        evaluate_every: int = 100,
        seed: int = 0,
        chance: int = 0,
        repeat: float = 0.0,
        edges: Place = "worker",
        lookahead: bool = False,
        adam: Adam | None = None,
    ) -> None:
        self.plan = passes(epochs, evaluate_every)
        parts = cut(graph, owners(graph, servers), intervals)
        source = source_rows(graph, model)
        self.model, self.graph = model, graph
        self.shards = [
            Shard(p, model, source[torch.from_numpy(p.vertices)], *self._own(graph, p.vertices)) for p in parts
        ]
        self.boards = [
            Board(
                model,
                server=i,
                feeds=s.feeds(),
                plan=self.plan,
                mode=mode,
                staleness=staleness,
                servers=servers,
                edges=edges,
            )
            for i, s in enumerate(self.shards)
        ]
        self.shelf = Shelf(range(model.layers), servers, adam or Adam(), lookahead=lookahead)
        first = initial_weights(model, seed, None)
        self.shelf.fill({f"{layer}.{n}": t for layer, own in first.items() for n, t in own.items()}, 0)
        self.kernel = Kernel(model, seed, graph.train_vertices)
        steps = [s for s in walk(model, train=True) if gradients_of(model, s)]
        self.tallies = [
            {
                layer: Tally(
                    [(i, str(s)) for i in range(shard.intervals) for s in steps if layer in gradients_of(model, s)]
                )
                for layer in range(model.layers)
            }
            for shard in self.shards
        ]
        self.draw = random.Random(chance)
        self.repeat = repeat
        self.kept: dict[tuple[int, int, int], Kept] = {}
        self.trace = Trace()
        for board in self.boards:
            for layer in range(model.layers):
                board.version(layer, 0)

    @staticmethod
    def _own(graph: Graph, vertices: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(graph.labels[vertices]), torch.from_numpy(graph.roles[vertices])

    def run(self) -> Trace:
        while not all(board.finished for board in self.boards):
            ready = [(i, t) for i, b in enumerate(self.boards) for p in ("worker", "server") for t in b.ready(p)]
            assert ready, [board.running() for board in self.boards]
            self.do(*self.draw.choice(ready))
        self.trace.weights = {
            layer: self.stashed(layer, self.shelf.newest(layer)).weights for layer in self.shelf.layers
        }
        return self.trace

    def do(self, server: int, task: Task) -> None:
        board, shard = self.boards[server], self.shards[server]
        step = board.step(task)
        if step.gathers:
            numbers = [i.number for b in self.boards for i in b._intervals]
            self.trace.spreads.append(task.number - min(numbers))
        if step.kind == "SC":
            for peer, tensors in shard.outgoing(step, task.interval).items():
                self.shards[peer].incoming(server, step.layer, step.back, task.interval, tensors)
                self.boards[peer].arrived((server, task.interval), step.layer, step.back, task.number)
            assert board.done(task, 0.0)
        elif step.kind == "GA":
            shard.gather(step, task.interval)
            assert board.done(task, 0.0)
        else:
            self.apply(server, task)
        for peer, other in enumerate(self.boards):
            if peer != server:
                other.progressed(server, board.own_slowest)

    def apply(self, server: int, task: Task) -> None:
        board, shard = self.boards[server], self.shards[server]
        step, now = board.step(task), self.plan[task.number]
        shard.prepare(step, task.interval)
        weights = {layer: self.stashed(layer, v).ahead(now.behind(v)) for layer, v in board.versions(task).items()}
        kept = (
            self.kept.pop((server, task.interval, step.layer), None) if step.back and self.draw.random() < 0.5 else None
        )
        inputs = shard.rows(shard.inputs(step, task.interval, kept=kept is not None))
        outcome = self.kernel.run(step, now, inputs, weights, kept)
        if outcome.kept is not None:
            self.kept[server, task.interval, step.layer] = outcome.kept
        for again in range(1 + (self.draw.random() < self.repeat)):
            if not board.done(task, 0.0):
                assert again, "the first result always counts"
                continue
            shard.take(step, task.interval, outcome.rows)
            if step.layer == self.model.layers and now.train:
                self.trace.add_loss(now.epoch, outcome.loss / self.graph.train_vertices)
            for layer, gradient in outcome.gradients.items():
                self.add(server, task, layer, str(step), gradient)

    def stashed(self, layer: int, version: int) -> Stashed:
        found = self.shelf.version(layer, version)
        assert found is not None, f"version {version} of layer {layer} was freed while somebody needs it"
        return found

    def add(self, server: int, task: Task, layer: int, step: str, gradient: dict[str, Tensor]) -> None:
        epoch = self.plan[task.number].epoch
        key = (epoch, server, task.interval, f"{step} {layer}")
        self.trace.counted[key] = self.trace.counted.get(key, 0) + 1
        total = self.tallies[server][layer].add(epoch, (task.interval, step), gradient)
        for version in self.shelf.add(epoch, layer, server, total) if total is not None else ():
            for board in self.boards:
                board.version(layer, version)
        for number, board in enumerate(self.boards):
            self.shelf.oldest(layer, number, board.oldest_version(layer))
        self.trace.kept_versions = max(self.trace.kept_versions, len(self.shelf.kept(layer)))
