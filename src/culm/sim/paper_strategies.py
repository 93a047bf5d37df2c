"""Published systems in the simulator: their own responses to events, as their papers describe them.

They run the schedule of the workload, so that a comparison shows what their responses are worth; or 1F1B, as published,
if the context says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.plan.reshape.reconfigure_policy import ReconfigureCosts, decide_by_bamboo_rule
from culm.sim.culm_strategies import CachedClusterState
from culm.sim.engine import StrategyResponse
from culm.sim.oobleck_strategy import SimulatedOobleck
from culm.sim.simulated_strategy import Alternative, FixedDepthStrategy, SimulatedStrategy, SimulationContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from culm.sim.engine import SimulatedNode

_NO_OUTLOOK = ReconfigureCosts(step_s_by_layout={}, next_loss_at=0.0)
"""Bamboo's rule uses neither costs nor the time."""


class SimulatedOnDemand(FixedDepthStrategy):
    """Nodes that are never preempted, at the on-demand price. It runs on its own steady trace."""

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.checkpoint_every_s = 0.0

    def step_s(self) -> float:
        return self.context.published_step_s(self.slots.pipelines)

    def after_loss(self) -> StrategyResponse:
        self.slots.rebuild_pipelines()
        return StrategyResponse(self.samples_per_s())

    def after_join(self) -> StrategyResponse | None:
        return (
            StrategyResponse(self.samples_per_s(), reason="a further pipeline") if self.slots.add_pipelines() else None
        )


class SimulatedCheckpointRestart(FixedDepthStrategy):
    """The baseline that Bamboo's authors measured, on 64 spot nodes with a model of 3.8 B parameters.

    88 s to restart, 50 s to load, 89 s to write a checkpoint, with the next one right after it; each of them delays
    training by 3.9 s. Newcomers join by a restart from the checkpoint, too.
    """

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.checkpoint_every_s = self.checkpoint_write_s = 89.0
        self.checkpoint_stall_s = 3.9

    def step_s(self) -> float:
        return self.context.published_step_s(self.slots.pipelines)

    def after_loss(self) -> StrategyResponse:
        return self._restart_from_checkpoint({"detect": self.cluster_costs.detect_s})

    def after_join(self) -> StrategyResponse | None:
        return self._restart_from_checkpoint({}) if self.slots.fillable_pipelines > self.slots.pipelines else None

    def _restart_from_checkpoint(self, pauses: dict[str, float]) -> StrategyResponse:
        self.slots.rebuild_pipelines()
        again = {**pauses, "restart": 88.0, "load": 50.0}
        return StrategyResponse(self.samples_per_s(), again, "checkpoint", "restart from the checkpoint")


class SimulatedVaruna(SimulatedStrategy):
    """The job is morphed to the best D x P for the present nodes, by a restart from the checkpoint.

    Training waits for a checkpoint after every tenth step.
    """

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.members: dict[str, SimulatedNode] = {}
        self.nodes_in_use = 0
        self.samples_per_s = 0.0
        self.checkpoint_write_s = 0.0
        self.checkpoint_stall_s = self.cluster_costs.load_s(self.workload)

    def fastest_shape(self) -> tuple[float, int]:
        """Rate and number of nodes of the fastest shape of equal pipelines."""
        w, n = self.workload, len(self.members)
        shapes = [(n // P, P) for P in range(w.min_stages, (w.layers or n) + 1) if 1 <= n // P <= w.micro_batches]
        published = self.context.as_published
        steps = [self.step_times.at_depth(D, P, as_published=published) for D, P in shapes]
        found = [(self.context.samples_per_s(step_s), D * P) for step_s, (D, P) in zip(steps, shapes, strict=True)]
        return max(found, default=(0.0, 0))

    def morph(self) -> None:
        self.samples_per_s, self.nodes_in_use = self.fastest_shape()
        self.checkpoint_every_s = 10 * self.workload.samples / self.samples_per_s if self.samples_per_s else 0.0

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        for node in nodes:
            self.members.pop(node.name, None)
        if not self.nodes_in_use:
            return None
        self.morph()
        return self.reload_checkpoint(self.samples_per_s)

    def on_nodes_joined(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        self.members.update((node.name, node) for node in nodes)
        rate = self.fastest_shape()[0]
        pauses = {"restart": self.cluster_costs.restart_s, "load": 2 * self.cluster_costs.load_s(self.workload)}
        stay = [Alternative("go on", self.samples_per_s)] if self.nodes_in_use else []
        return self.take_best([*stay, Alternative("morph", rate, pauses, self.morph)]) if rate else None


class SimulatedBamboo(FixedDepthStrategy):
    """Redundant computation as published, with the rules of the authors' simulator and what it leaves out.

    Steps include the cost of eager redundancy. The predecessor of a lost node takes over, at 1.5 times the step. A
    rendezvous (20 s) rebalances when standby nodes can relieve all overloaded nodes, when more than 5 % of the losses
    would be fatal, or when another pipeline fits. A fatal loss goes back to the checkpoint.
    """

    spread_zones = True

    def step_s(self) -> float:
        step = self.step_times.redundant(self.slots.pipelines, as_published=self.context.as_published)
        return step * 1.5 if self.slots.holes else step

    def after_loss(self) -> StrategyResponse:
        if self.is_fatal_loss():
            return self.restart()
        redo = len(self.lost_slots) * self.cluster_costs.shadow_redo_s(
            self.workload, pipelines=self.slots.pipelines, phase=self.phase
        )
        pauses = {**self.cluster_costs.detection_pauses, "redo": redo}
        if not self.should_rebalance():
            return StrategyResponse(self.samples_per_s(), pauses, reason="the shadow takes over")
        self.slots.rebuild_pipelines()
        return StrategyResponse(self.samples_per_s(), {**pauses, "restart": 20.0}, reason="rendezvous")

    def is_fatal_loss(self) -> bool:
        """Whether two neighbours of a pipeline are missing: then a stage has no holder left in it."""
        holes = self.slots.holes
        return any((d, (s - 1) % self.slots.stages) in holes for d, s in holes) or self.slots.stages == 1

    def should_rebalance(self) -> bool:
        """The published rule for a rebalancing, as implemented in the planner."""
        slots = self.slots
        present = [*slots.nodes.values(), *slots.standby.values()]
        state = CachedClusterState(
            zone_by_node={node.name: node.zone for node in present},
            node_by_slot={slot: node.name for slot, node in slots.nodes.items()},
            depths=(slots.stages,) * slots.pipelines,
            max_pipelines=slots.max_pipelines,
            unfilled=frozenset(slots.holes),
            spare_nodes=tuple(slots.standby),
        )
        return decide_by_bamboo_rule(state, _NO_OUTLOOK, 0.0)[0].kind != "stay"

    def after_join(self) -> StrategyResponse | None:
        if not self.should_rebalance():
            return None
        self.slots.rebuild_pipelines()
        return StrategyResponse(self.samples_per_s(), {"restart": 20.0}, reason="rendezvous")


ON_DEMAND = "on-demand"
PUBLISHED_STRATEGIES: dict[str, type[SimulatedStrategy]] = {
    "bamboo": SimulatedBamboo,
    "oobleck": SimulatedOobleck,
    "varuna": SimulatedVaruna,
    "checkpoint-restart": SimulatedCheckpointRestart,
    ON_DEMAND: SimulatedOnDemand,
}
"""By the name under which `culm simulate` knows them. Runs cannot use them."""
