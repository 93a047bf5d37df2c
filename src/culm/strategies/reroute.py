"""`reroute`: the peers of a lost worker share its micro-batches."""

from __future__ import annotations

from culm.errors import UsageError
from culm.plan.rent.strategy_goodput import (
    GoodputInputs,
    StrategyGoodput,
    add_checkpoint_cost,
    slowdown_with_missing_nodes,
    slowest_stage_s,
)
from culm.strategies.strategy import RunShape, Strategy, check_has_other_node


class RerouteStrategy(Strategy):
    """Workers keep only their own stage. A stage that is left with one holder is copied to another worker."""

    name = "reroute"
    summary = "the peers of a lost node run its micro-batches"
    preference = 10

    def check(self, run: RunShape) -> None:
        check_has_peers(self.name, run)

    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        return reroute_goodput(self.name, run)

    def advantage(self, run: GoodputInputs) -> str:
        return "peers hold every layer, and nothing has to be done ahead"


def check_has_peers(name: str, run: RunShape) -> None:
    """Raise UsageError if there is one pipeline, or one node."""
    if run.pipelines == 1:
        raise UsageError(f"--strategy {name} needs peers, and there is 1 pipeline: use --pipelines 2, or shadow")
    check_has_other_node(name, run)


def reroute_goodput(
    name: str, run: GoodputInputs, *, extra_holders: int = 0, overhead: float = 0.0
) -> StrategyGoodput | None:
    """The goodput when peers share the work of lost workers; None with one pipeline.

    `extra_holders`: replicas of each stage beside those of its peers. `overhead`: what they cost, as a share of a step.
    """
    case, risk, nodes = run.case, run.risk, run.nodes
    if case.pipelines < 2 or nodes < 2:
        return None
    missing = risk.mean_missing_nodes(nodes)
    slowdown = slowdown_with_missing_nodes(run)
    micros = len(case.micros_by_pipeline[0])
    # The peers of different stages run lost work at the same time; half of a step is lost on average.
    redo = run.losses_of_one_stage * slowest_stage_s(case) * micros / 2 / (case.pipelines - 1)
    # Fatal: a node is lost while all others that hold its stages are missing already.
    others = run.holder_nodes - 1 + extra_holders
    fatal = risk.loss_events_per_s(nodes) * min(1.0, risk.mean_group_size * (missing / nodes) ** others)
    return add_checkpoint_cost(
        name,
        run,
        step_s=run.failure_free_step_s * slowdown * (1 + overhead),
        pause_s=risk.detect_s + risk.decide_s + redo + risk.join_s,
        fatal_per_s=fatal,
    )
