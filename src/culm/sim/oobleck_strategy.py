"""Oobleck in the simulator: pipelines of unequal depth, formed anew at each event, so that no node idles."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from culm.sim.simulated_strategy import Alternative, SimulatedStrategy, SimulationContext
from culm.sim.slot_table import sort_by_zone

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from culm.sim.engine import SimulatedNode, StrategyResponse


class UnequalPipelines:
    """Pipelines as rows of nodes; node i of a row of n holds the i-th of n parts of the model."""

    def __init__(self) -> None:
        self.pipelines: list[list[SimulatedNode]] = []

    def arrange(self, nodes: Iterable[SimulatedNode], depths: Sequence[int]) -> None:
        """Fill rows of these depths; each row is in one zone as far as possible."""
        order = iter(sort_by_zone(nodes))
        self.pipelines = [[next(order) for _ in range(depth)] for depth in depths]

    def __contains__(self, node: SimulatedNode) -> bool:
        return any(node in row for row in self.pipelines)

    def __len__(self) -> int:
        """Number of nodes in all rows."""
        return sum(map(len, self.pipelines))

    def all_layers_held_without(self, lost_nodes: Iterable[SimulatedNode]) -> bool:
        """Whether every part of the model has a holder left in some row."""
        without = set(lost_nodes)
        lost = [
            [(i / len(row), (i + 1) / len(row)) for i, node in enumerate(row) if node in without]
            for row in self.pipelines
        ]
        edges = sorted({edge for parts in lost for part in parts for edge in part})
        middles = [(a + b) / 2 for a, b in pairwise(edges)]
        return not any(all(any(a < x < b for a, b in parts) for parts in lost) for x in middles)


class SimulatedOobleck(SimulatedStrategy):
    """All nodes form pipelines of unequal depth, anew after each loss; the open step is repeated. After nodes joined
    they are formed anew at once, if that pays. As published, steps have the bubbles of 1F1B."""

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.members: dict[str, SimulatedNode] = {}
        self.pipelines = UnequalPipelines()
        self.samples_per_s = 0.0

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        for node in nodes:
            self.members.pop(node.name, None)
        if not any(node in self.pipelines for node in nodes):
            return None
        before = self.samples_per_s
        held = self.pipelines.all_layers_held_without(nodes) or self.cluster_costs.can_hand_over(self.workload)
        self.instantiate_pipelines()
        if not held or not self.samples_per_s:
            return self.reload_checkpoint(self.samples_per_s)
        return self.take_best(
            [
                Alternative(
                    "re-instantiate",
                    self.samples_per_s,
                    {**self.cluster_costs.detection_pauses, **self.reinstantiation_pauses(before)},
                )
            ]
        )

    def on_nodes_joined(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        self.members.update((node.name, node) for node in nodes)
        rate = self.rate_with_all_members()
        if not rate:
            return None
        if not self.pipelines:
            return self.take_best(
                [Alternative("start", rate, {"start": self.cluster_costs.restart_s}, self.instantiate_pipelines)]
            )
        return self._reinstantiate_if_better()

    def _reinstantiate_if_better(self) -> StrategyResponse:
        more = Alternative(
            "re-instantiate with more",
            self.rate_with_all_members(),
            self.reinstantiation_pauses(0.0),
            self.instantiate_pipelines,
        )
        return self.take_best([Alternative("go on", self.samples_per_s), more])

    def rate_with_all_members(self) -> float:
        """The rate if all members take part."""
        step_s, depths = self._best_depths()
        return self.context.samples_per_s(step_s) if depths else 0.0

    def _best_depths(self) -> tuple[float, tuple[int, ...]]:
        return self.step_times.unequal_depths(len(self.members), as_published=self.context.as_published)

    def instantiate_pipelines(self) -> None:
        self.pipelines.arrange(self.members.values(), self._best_depths()[1])
        self.samples_per_s = self.rate_with_all_members()

    def reinstantiation_pauses(self, rate: float) -> dict[str, float]:
        """The work of the open step is lost; then layers move to their new holders."""
        done = self.phase * self.workload.samples / rate if rate and not self.cluster_costs.notice_s else 0.0
        return {"redo": done, "move": self.cluster_costs.move_s(self.workload), "join": self.cluster_costs.join_s}
