"""`auto`: the registered strategy with the highest expected goodput. Pure.

With several pipelines peers hold every layer, and nothing has to be done ahead. With one pipeline each layer would have
one holder; shadow replicas give it a second one. Both use a checkpoint if all holders of a layer are lost at once; how
often one is written follows from the preemption rate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.plan.rent.strategy_goodput import GoodputInputs, PreemptionRisk, StrategyGoodput
from culm.strategies.checkpoint import CheckpointStrategy
from culm.strategies.none import NoneStrategy
from culm.strategies.strategy import RunShape, Strategy, StrategyChoice

if TYPE_CHECKING:
    from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext

_TIE_TOLERANCE = 0.02
"""Estimates that differ by less than this share count as equal: the strategy with the lowest `preference` is chosen."""


class AutoStrategy(Strategy):
    """Chooses among the registered strategies that fit the shape and give an estimate."""

    name = "auto"
    summary = "the strategy with the highest expected goodput for the shape"
    preference = 0
    considered_by_auto = False
    chooses_another = True

    def choose(self, run: GoodputInputs, shape: RunShape) -> StrategyChoice:
        """The strategy with the highest expected goodput; `none` on a single node."""
        from culm.strategies import registry

        if shape.nodes == 1:
            alone = registry.get(NoneStrategy.name)
            return StrategyChoice(alone, f"strategy {alone.name}: with one node no other node could go on")
        usable = [each for each in registry.by_preference() if each.considered_by_auto and _fits(each, shape)]
        estimates = {each: goodput for each in usable if (goodput := each.estimate_for_auto(run)) is not None}
        shares = {each: _relative_speed(goodput, run) for each, goodput in estimates.items()}
        best = next(each for each in shares if shares[each] >= (1 - _TIE_TOLERANCE) * max(shares.values()))
        others = ", ".join(f"{each.name} {share:.0%}" for each, share in shares.items() if each is not best)
        why = (
            f"strategy {best.name}: {best.advantage(run)}; expected goodput: {shares[best]:.0%} of a failure-free run, "
            f"at {run.risk.preemption_rate:.0%} preemptions per hour{f' ({others})' if others else ''}"
        )
        interval = estimates[best].checkpoint_interval_s if shape.has_folder else None
        return StrategyChoice(best, why, interval)

    def simulated(self, context: SimulationContext) -> SimulatedStrategy:
        """The strategy that a run would choose at the default preemption rate; `checkpoint` where a run would not
        survive a loss."""
        workload, costs = context.workload, context.cluster_costs
        risk = PreemptionRisk(
            detect_s=costs.detect_s,
            decide_s=costs.decide_s,
            join_s=costs.join_s,
            restart_s=costs.restart_s,
            checkpoint_stall_s=costs.stall_s,
            storage_bandwidth=costs.storage,
            shadow_overhead=costs.shadow,
        )
        case = workload.planning_case(workload.pipelines)
        run = GoodputInputs(
            case=case,
            failure_free_step_s=context.step_times.healthy(workload.pipelines),
            nodes=workload.nodes,
            state_bytes=workload.state_bytes,
            risk=risk,
        )
        chosen = self.choose(run, RunShape(case.pipelines, case.stages)).strategy
        return (chosen if chosen.survives_losses else CheckpointStrategy()).simulated(context)


def _fits(strategy: Strategy, shape: RunShape) -> bool:
    """Whether the requirements of a strategy are met."""
    try:
        strategy.check(shape)
    except UsageError:
        return False
    return True


def _relative_speed(goodput: StrategyGoodput, run: GoodputInputs) -> float:
    """Expected speed as a share of that of a failure-free run."""
    return goodput.useful_share * run.failure_free_step_s / goodput.step_s if goodput.step_s else goodput.useful_share
