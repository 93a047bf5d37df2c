"""`none`: nothing is kept, and the first lost node ends the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.strategies.strategy import Strategy

if TYPE_CHECKING:
    from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext


class NoneStrategy(Strategy):
    """Workers keep no outputs and send no heartbeats; a lost node ends the run with NodeLost."""

    name = "none"
    summary = "a lost node ends the run"
    preference = 80
    required_holders = 1
    copies_stages = False
    keeps_outputs = False
    survives_losses = False
    recovers_in_place = False
    reshapes = False

    def simulated(self, context: SimulationContext) -> SimulatedStrategy:
        from culm.sim.baseline_strategies import SimulatedNone

        return SimulatedNone(context)
