"""`migrate`: a node with notice hands its state to others; a loss without notice goes back to a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.strategies.checkpoint import check_can_restart
from culm.strategies.strategy import RunShape, Strategy

if TYPE_CHECKING:
    from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext


class MigrateStrategy(Strategy):
    """Only the notice saves work: nothing is copied before it."""

    name = "migrate"
    summary = "a node hands its state over within its notice; without notice as checkpoint"
    preference = 50
    required_holders = 1
    recovers_in_place = False
    restarts_from_checkpoint = True
    reshapes = False

    def check(self, run: RunShape) -> None:
        check_can_restart(self.name, run)

    def simulated(self, context: SimulationContext) -> SimulatedStrategy:
        from culm.sim.baseline_strategies import SimulatedMigrate

        return SimulatedMigrate(context, self)
