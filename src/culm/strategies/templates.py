"""`templates`: after every loss all remaining nodes form new pipelines, of unequal depth if necessary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.strategies.reroute import check_has_peers
from culm.strategies.strategy import RunShape, Strategy

if TYPE_CHECKING:
    from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext


class TemplatesStrategy(Strategy):
    """No node idles: layers move to the new pipelines from the replicas that are left, and the open step runs again."""

    name = "templates"
    summary = "the nodes that are left form new pipelines, of unequal depth if need be"
    preference = 40
    recovers_in_place = False
    rebuilds_pipelines = True

    def reshape_policy(self, requested: str) -> str:
        """By cost: Bamboo's rule knows only pipelines of equal depth."""
        return "cost" if requested == "bamboo" else requested

    def check(self, run: RunShape) -> None:
        check_has_peers(self.name, run)

    def simulated(self, context: SimulationContext) -> SimulatedStrategy:
        from culm.sim.baseline_strategies import SimulatedTemplates

        return SimulatedTemplates(context, self)
