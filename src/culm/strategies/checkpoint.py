"""`checkpoint`: every change of the members takes the run back to the newest checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.plan.rent.strategy_goodput import (
    GoodputInputs,
    StrategyGoodput,
    add_checkpoint_cost,
    step_s_on_complete_pipelines,
)
from culm.strategies.strategy import RunShape, Strategy

if TYPE_CHECKING:
    from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext


class CheckpointStrategy(Strategy):
    """Nothing is kept in memory. The run restarts from the newest checkpoint on as many complete pipelines as it has
    nodes for; nodes that join also cause a restart."""

    name = "checkpoint"
    summary = "every loss goes back to the newest checkpoint"
    preference = 70
    required_holders = 1
    keeps_outputs = False
    recovers_in_place = False
    restarts_from_checkpoint = True
    reshapes = False

    def returns_to_checkpoint(self, lost_nodes: Collection[int]) -> bool:
        return True

    def check(self, run: RunShape) -> None:
        check_can_restart(self.name, run)

    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        """Only complete pipelines train, and every loss returns to the newest checkpoint."""
        step_s = step_s_on_complete_pipelines(run, run.failure_free_step_s)
        losses = run.risk.loss_events_per_s(run.nodes)
        return add_checkpoint_cost(self.name, run, step_s=step_s, pause_s=0.0, fatal_per_s=losses)

    def advantage(self, run: GoodputInputs) -> str:
        return "it costs least where so few nodes are lost"

    def simulated(self, context: SimulationContext) -> SimulatedStrategy:
        from culm.sim.baseline_strategies import SimulatedCheckpoint

        return SimulatedCheckpoint(context, self)


def check_can_restart(name: str, run: RunShape) -> None:
    """Raise UsageError if no node would be left after a loss, or if checkpoints cannot be written."""
    if run.pipelines * run.stages == 1:
        raise UsageError(
            f"--strategy {name} needs a node that goes on after a loss, and there is 1: use --nodes 2, or none"
        )
    if not run.has_folder:
        raise UsageError(f"--strategy {name} needs a folder for its checkpoints: add --out, as in --out runs/a")
