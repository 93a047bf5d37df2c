"""A strategy of your own: as reroute, with a third replica of every stage.

With two pipelines `reroute` goes back to a checkpoint if both holders of a stage are lost at once. Here the workers of
the first pipeline also hold a shadow replica of their successor's stage. Peers still share the work of a lost node; the
replicas are used only where no peer is left. In this folder:

    culm run gpt.py --pipelines 2 --stages 3 --strategy own_strategy:ThreeHolders
    culm plan --model bert-large --instance p3.2xlarge --nodes 8 --strategy own_strategy:ThreeHolders
    culm chaos --seeds 50 --strategy own_strategy:ThreeHolders
"""

from culm.errors import UsageError
from culm.plan.recover.role_assignment import ShadowReplica, successor_shadows
from culm.plan.rent.strategy_goodput import GoodputInputs, StrategyGoodput
from culm.schedule import Plan
from culm.strategies import RunShape
from culm.strategies.reroute import RerouteStrategy, reroute_goodput


class ThreeHolders(RerouteStrategy):
    summary = "the peers of a lost node run its micro-batches, and every stage has a third holder"
    required_holders = 3

    def initial_shadows(self, plan: Plan) -> tuple[ShadowReplica, ...]:
        return tuple(replica for replica in successor_shadows(plan) if replica.slot < plan.stages)

    def check(self, run: RunShape) -> None:
        super().check(run)
        if run.stages == 1:
            raise UsageError(f"--strategy {self.name} shadows the next stage, and there is 1: use --stages 2")

    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        if run.case.stages == 1:
            return None
        return reroute_goodput(self.name, run, extra_holders=1, overhead=run.risk.shadow_overhead)
