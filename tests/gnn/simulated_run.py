"""A whole run in one process: schedulers, shards and a weight stash. A random generator chooses the next task. No
sockets, no clocks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from culm.gnn.graph.csr_graph import Graph
from culm.gnn.graph.graph_generators import generate_graph
from culm.gnn.graph.graph_partition import assign_owners, build_parts
from culm.gnn.model.dense_kernels import ForwardCache
from culm.gnn.model.gnn_model import GnnModel, initial_weights
from culm.gnn.model.pass_steps import Place, layers_with_gradients, steps_of_pass
from culm.gnn.model.task_kernel import TaskKernel
from culm.gnn.run_preparation import first_layer_inputs
from culm.gnn.scheduler.interval_scheduler import IntervalScheduler, Mode
from culm.gnn.scheduler.passes import IntervalTask, list_passes
from culm.gnn.server.gradient_reducer import GradientReducer
from culm.gnn.server.graph_shard import GraphShard
from culm.gnn.server.weight_prediction import StashedWeights
from culm.gnn.server.weight_stash import Adam, WeightStash


def small_graph(seed: int = 0) -> Graph:
    return generate_graph(f"gen:sbm,vertices=90,classes=3,degree=6,features=7,seed={seed}")


def small_model(graph: Graph, kind: str = "gcn", *, layers: int = 2, hidden: int = 6, dropout: float = 0.0) -> GnnModel:
    widths = (graph.width, *[hidden] * (layers - 1), graph.classes)
    heads = 2 if kind == "gat" else 1
    return GnnModel(kind=kind, widths=widths, heads=heads, dropout=dropout, input_dropout=dropout)  # type: ignore[arg-type]


@dataclass
class SimulatedResult:
    """Result of a simulated run."""

    losses: dict[int, float] = field(default_factory=dict)
    gradient_counts: dict[tuple[int, int, int, str], int] = field(default_factory=dict)
    """By epoch, server, interval and step: how often a gradient was added."""
    spreads: list[int] = field(default_factory=list)
    """At every gather: passes between the gathering interval and the slowest interval of all servers."""
    row_ages: list[int] = field(default_factory=list)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    kept_versions: int = 0
    _losses: dict[int, list[float]] = field(default_factory=dict)

    def add_loss(self, epoch: int, share: float) -> None:
        """Add the loss of an interval. The sum does not depend on the order."""
        self._losses.setdefault(epoch, []).append(share)
        self.losses[epoch] = math.fsum(self._losses[epoch])


class SimulatedRun:
    """Graph servers and a parameter server. `repeat_chance` is the probability that a completed task is completed a
    second time."""

    def __init__(
        self,
        graph: Graph,
        model: GnnModel,
        *,
        servers: int = 2,
        intervals: int = 3,
        mode: Mode = "sync",
        staleness: int = 0,
        epochs: int = 5,
        evaluate_every: int = 100,
        seed: int = 0,
        order_seed: int = 0,
        repeat_chance: float = 0.0,
        edge_place: Place = "worker",
        lookahead: bool = False,
        adam: Adam | None = None,
    ) -> None:
        self.passes = list_passes(epochs, evaluate_every)
        parts = build_parts(graph, assign_owners(graph, servers), intervals)
        source = first_layer_inputs(graph, model)
        self.model, self.graph = model, graph
        self.shards = [
            GraphShard(p, model, source[torch.from_numpy(p.vertices)], *self._labels_and_roles(graph, p.vertices))
            for p in parts
        ]
        self.schedulers = [
            IntervalScheduler(
                model,
                server=i,
                gather_sources=s.gather_sources(),
                passes=self.passes,
                mode=mode,
                staleness=staleness,
                servers=servers,
                edge_place=edge_place,
            )
            for i, s in enumerate(self.shards)
        ]
        self.stash = WeightStash(range(model.layers), servers, adam or Adam(), lookahead=lookahead)
        first = initial_weights(model, seed, None)
        self.stash.load({f"{layer}.{n}": t for layer, weights in first.items() for n, t in weights.items()}, 0)
        self.kernel = TaskKernel(model, seed, graph.train_vertices)
        steps = [s for s in steps_of_pass(model, train=True) if layers_with_gradients(model, s)]
        self.reducers = [
            {
                layer: GradientReducer(
                    [
                        (i, str(s))
                        for i in range(shard.intervals)
                        for s in steps
                        if layer in layers_with_gradients(model, s)
                    ]
                )
                for layer in range(model.layers)
            }
            for shard in self.shards
        ]
        self.rng = random.Random(order_seed)
        self.repeat_chance = repeat_chance
        self.forward_caches: dict[tuple[int, int, int], ForwardCache] = {}
        self.result = SimulatedResult()
        for scheduler in self.schedulers:
            for layer in range(model.layers):
                scheduler.record_version(layer, 0)

    @staticmethod
    def _labels_and_roles(graph: Graph, vertices: Any) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(graph.labels[vertices]), torch.from_numpy(graph.roles[vertices])

    def run(self) -> SimulatedResult:
        while not all(scheduler.is_finished for scheduler in self.schedulers):
            ready = [
                (i, t) for i, b in enumerate(self.schedulers) for p in ("worker", "server") for t in b.ready_tasks(p)
            ]
            assert ready, [scheduler.busy_count for scheduler in self.schedulers]
            self.run_task(*self.rng.choice(ready))
        self.result.weights = {
            layer: self.get_stashed(layer, self.stash.newest_version(layer)).weights for layer in self.stash.layers
        }
        return self.result

    def run_task(self, server: int, task: IntervalTask) -> None:
        scheduler, shard = self.schedulers[server], self.shards[server]
        step = scheduler.step_of(task)
        if step.reads_scattered_rows:
            numbers = [i.pass_number for b in self.schedulers for i in b._intervals]
            self.result.spreads.append(task.pass_number - min(numbers))
        if step.kind == "SC":
            for peer, tensors in shard.rows_to_scatter(step, task.interval).items():
                self.shards[peer].store_scattered_rows(server, step.layer, step.backward, task.interval, tensors)
                self.schedulers[peer].record_rows((server, task.interval), step.layer, step.backward, task.pass_number)
            assert scheduler.complete_task(task, 0.0)
        elif step.kind == "GA":
            shard.gather(step, task.interval)
            assert scheduler.complete_task(task, 0.0)
        else:
            self.apply_task(server, task)
        for peer, other in enumerate(self.schedulers):
            if peer != server:
                other.record_peer_progress(server, scheduler.own_slowest_pass)

    def apply_task(self, server: int, task: IntervalTask) -> None:
        scheduler, shard = self.schedulers[server], self.shards[server]
        step, graph_pass = scheduler.step_of(task), self.passes[task.pass_number]
        shard.prepare_edge_inputs(step, task.interval)
        weights = {
            layer: self.get_stashed(layer, v).predict(graph_pass.updates_behind(v))
            for layer, v in scheduler.pin_versions(task).items()
        }
        forward_cache = (
            self.forward_caches.pop((server, task.interval, step.layer), None)
            if step.backward and self.rng.random() < 0.5
            else None
        )
        inputs = shard.read_slices(shard.task_inputs(step, task.interval, forward_kept=forward_cache is not None))
        result = self.kernel.run_task(step, graph_pass, inputs, weights, forward_cache)
        if result.forward_cache is not None:
            self.forward_caches[server, task.interval, step.layer] = result.forward_cache
        for attempt in range(1 + (self.rng.random() < self.repeat_chance)):
            if not scheduler.complete_task(task, 0.0):
                assert attempt, "the first result always counts"
                continue
            shard.store_result(step, task.interval, result.rows)
            if step.layer == self.model.layers and graph_pass.train:
                self.result.add_loss(graph_pass.epoch, result.loss / self.graph.train_vertices)
            for layer, gradient in result.gradients.items():
                self.add_gradient(server, task, layer, str(step), gradient)

    def get_stashed(self, layer: int, version: int) -> StashedWeights:
        stashed = self.stash.get_version(layer, version)
        assert stashed is not None, f"version {version} of layer {layer} was freed although an interval needs it"
        return stashed

    def add_gradient(self, server: int, task: IntervalTask, layer: int, step: str, gradient: dict[str, Tensor]) -> None:
        epoch = self.passes[task.pass_number].epoch
        key = (epoch, server, task.interval, f"{step} {layer}")
        self.result.gradient_counts[key] = self.result.gradient_counts.get(key, 0) + 1
        total = self.reducers[server][layer].add(epoch, (task.interval, step), gradient)
        for version in self.stash.add_gradient(epoch, layer, server, total) if total is not None else ():
            for scheduler in self.schedulers:
                scheduler.record_version(layer, version)
        for number, scheduler in enumerate(self.schedulers):
            self.stash.release_older_than(layer, number, scheduler.oldest_needed_version(layer))
        self.result.kept_versions = max(self.result.kept_versions, len(self.stash.stashed_versions(layer)))
