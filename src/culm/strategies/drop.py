"""`drop`: a pipeline that lacks a node pauses, and its samples are left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.plan.recover.role_assignment import (
    RoleAssignment,
    SurvivingCluster,
    assign_every_stage,
    complete_pipelines,
    drop_incomplete_pipelines,
)
from culm.plan.rent.strategy_goodput import GoodputInputs
from culm.strategies.strategy import RunShape, Strategy, StrategyChoice, check_has_other_node

if TYPE_CHECKING:
    from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext


class DropStrategy(Strategy):
    """Complete pipelines go on with their own micro-batches; those of the others are dropped until a node has filled
    the empty slot. Where no pipeline is complete, the remaining nodes run every stage."""

    name = "drop"
    summary = "a pipeline that lacks a node pauses and its samples are left out, which changes training"
    preference = 60
    required_holders = 1
    recovers_in_place = False
    reshapes = False
    changes_training = True

    def assign_roles(self, cluster: SurvivingCluster) -> RoleAssignment:
        complete = complete_pipelines(cluster)
        return drop_incomplete_pipelines(cluster, complete) if complete else assign_every_stage(cluster)

    def check(self, run: RunShape) -> None:
        if run.pipelines == 1:
            raise UsageError(
                f"--strategy {self.name} needs a pipeline that goes on, and there is 1: "
                "use --pipelines 2, or checkpoint"
            )
        check_has_other_node(self.name, run)

    def choose(self, run: GoodputInputs, shape: RunShape) -> StrategyChoice:
        chosen = super().choose(run, shape)
        why = f"{chosen.why}: samples of a pipeline that misses a node are left out, which changes training"
        return StrategyChoice(self, why, chosen.checkpoint_interval_s)

    def simulated(self, context: SimulationContext) -> SimulatedStrategy:
        from culm.sim.baseline_strategies import SimulatedDrop

        return SimulatedDrop(context, self)
