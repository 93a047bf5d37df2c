"""`shadow` and `shadow-lazy`: every worker holds a replica of its successor's stage and stands in for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.plan.rent.strategy_goodput import (
    GoodputInputs,
    StrategyGoodput,
    add_checkpoint_cost,
    mean_step_s,
    slowest_stage_s,
    step_s_on_complete_pipelines,
)
from culm.schedule import Kind
from culm.strategies.strategy import RunShape, Strategy, check_has_other_node

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase


class LazyShadowStrategy(Strategy):
    """The predecessor of a lost worker runs both stages. Replicas are kept up to date and run nothing ahead."""

    name = "shadow-lazy"
    summary = "as shadow, but replicas run nothing ahead of a loss"
    preference = 30
    shadows_every_stage = True
    prefers_stand_ins = True
    considered_by_auto = False

    def check(self, run: RunShape) -> None:
        if run.stages == 1:
            raise UsageError(
                f"--strategy {self.name} needs a predecessor, and there is 1 stage: use --stages 2, or reroute"
            )
        check_has_other_node(self.name, run)

    def zones_wanted(self, case: PlanCase) -> int:
        """Two: the worker and its shadow."""
        return 2

    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        """While a worker is missing another one runs two stages, or the batch goes to the complete pipelines."""
        case, risk, nodes = run.case, run.risk, run.nodes
        if case.stages < 2 or nodes < 2:
            return None
        price, micros = case.action_costs, len(case.micros_by_pipeline[0])
        kept_s = run.failure_free_step_s * (1 + risk.shadow_overhead)
        missing = min(1.0, risk.mean_missing_nodes(nodes))
        hurt_s = min(kept_s + micros * slowest_stage_s(case), step_s_on_complete_pipelines(run, kept_s))
        redo = (slowest_stage_s(case) - (max(price[Kind.F]) if self.eager_forwards else 0.0)) * micros / 2
        pause = risk.detect_s + risk.decide_s + redo + risk.join_s
        # Fatal: two neighbours at once. In a group of g from one zone, each of the other g - 1 may be a neighbour of
        # any worker of the node.
        neighbours = 2 * max(1.0, run.workers_per_node)
        fatal = risk.loss_events_per_s(nodes) * min(
            1.0, max(risk.mean_group_size - 1, risk.mean_missing_nodes(nodes)) * neighbours / max(1, nodes - 1)
        )
        step_s = mean_step_s(kept_s, hurt_s, missing)
        return add_checkpoint_cost(self.name, run, step_s=step_s, pause_s=pause, fatal_per_s=fatal)

    def advantage(self, run: GoodputInputs) -> str:
        if run.case.pipelines > 1:
            return "shadow replicas cost less here than missing peers"
        return "with one pipeline no other node would hold a lost node's layers"


class ShadowStrategy(LazyShadowStrategy):
    """As LazyShadowStrategy. Replicas also run forwards ahead of a loss, in bubbles that are long enough."""

    name = "shadow"
    summary = "the predecessor of a lost node has a replica of its layers and runs both stages"
    preference = 20
    eager_forwards = True
    considered_by_auto = True

    def estimate_for_auto(self, run: GoodputInputs) -> StrategyGoodput | None:
        """Priced as the lazy one: forwards run ahead only in bubbles that are long enough, which is not known yet."""
        return LazyShadowStrategy().estimate(run)
