"""The contract of a strategy: what it keeps, which workers stand in, what it decides, requires and costs. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.errors import UsageError
from culm.plan.recover.role_assignment import RecoveryPolicy, shadows_on_other_nodes
from culm.plan.rent.strategy_goodput import GoodputInputs, StrategyGoodput, best_checkpoint_interval_s

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase
    from culm.schedule import Plan
    from culm.sim.simulated_strategy import SimulatedStrategy, SimulationContext


@dataclass(frozen=True)
class RunShape:
    """What the requirements of a strategy are checked against."""

    pipelines: int
    stages: int
    has_folder: bool = True
    """Whether checkpoints can be written."""
    workers_per_node: int = 1

    @property
    def nodes(self) -> int:
        return max(1, self.pipelines * self.stages // self.workers_per_node)


@dataclass(frozen=True)
class StrategyChoice:
    """The strategy that a run uses, and why."""

    strategy: Strategy
    why: str
    """One clause for the start of the run."""
    checkpoint_interval_s: float | None = None
    """Best seconds between two checkpoints; None: the strategy needs none."""


def check_has_other_node(name: str, run: RunShape) -> None:
    """Raise UsageError if all workers are on one node, and so are lost together."""
    if run.nodes == 1 and run.workers_per_node > 1:
        raise UsageError(
            f"--strategy {name} needs a holder on another node, and there is 1 node with {run.workers_per_node} "
            "workers: use --nodes 2, or checkpoint"
        )


class Strategy(RecoveryPolicy):
    """What a run does about lost nodes. Subclass it, or one of the built-in strategies, to define your own.

    An instance has no state: one object serves all runs of a process, and every node of a run creates its own from the
    name. Every attribute and method has a default; the defaults describe a run that continues with the replicas that
    peers hold. `RecoveryPolicy` has the attributes that say what is kept (`shadows_every_stage`, `required_holders`,
    `copies_stages`, `initial_shadows`) and which workers stand in (`prefers_stand_ins`, `stand_in_rank`,
    `assign_roles`). Methods must be deterministic: a new leader has to reach the same decisions.
    """

    name: str = ""
    """The value of --strategy that selects it. The registry sets it to "module:Class" for a class outside of culm."""
    summary: str = ""
    """One line for help texts."""

    # What it keeps.

    keeps_outputs: bool = True
    """Workers keep the outputs of their actions until the step commits, so that only lost actions are run again."""
    eager_forwards: bool = False
    """Shadow replicas run forwards ahead of a loss, in bubbles that are long enough."""

    # What it decides after a loss.

    survives_losses: bool = True
    """False: the run ends with the first lost node."""
    recovers_in_place: bool = True
    """Live replicas replace lost nodes within the current shape. The fault kit draws losses only for such ones."""
    restarts_from_checkpoint: bool = False
    """A loss without notice takes the run back to the newest checkpoint, so it has to write some."""
    reshapes: bool = True
    """The run may change its shape while it trains: its layers live in replicas, not in checkpoints."""
    rebuilds_pipelines: bool = False
    """Every loss forms new pipelines, possibly of unequal depth, from the nodes that are left."""
    changes_training: bool = False
    """Samples are left out after a loss, so the result differs from a run without losses."""

    # How it is offered.

    preference: int = 100
    """Order of strategies with equal estimates: the lowest is chosen."""
    considered_by_auto: bool = True
    """Whether `auto` may choose it, if it gives an estimate."""
    chooses_another: bool = False
    """Whether `choose` returns another strategy: then this one never runs itself."""

    def returns_to_checkpoint(self, lost_nodes: Collection[int]) -> bool:
        """Whether the next epoch starts from the newest checkpoint. `lost_nodes` vanished without notice; it is empty
        when nodes only joined or left after a notice."""
        return self.restarts_from_checkpoint and bool(lost_nodes)

    @property
    def allows_one_pipeline(self) -> bool:
        """Whether a run may shrink to one pipeline: then a stage needs a holder that is not a peer."""
        return self.shadows_every_stage

    def reshape_policy(self, requested: str) -> str:
        """The reconfigure policy, `cost` or `bamboo`, by which shapes are chosen, if `requested` was asked for."""
        return requested

    # What it requires.

    def check(self, run: RunShape) -> None:
        """Raise UsageError, in one sentence that names the fix, if the strategy cannot work in this shape."""

    def choose(self, run: GoodputInputs, shape: RunShape) -> StrategyChoice:
        """The strategy that runs when this one is selected: itself."""
        interval = best_checkpoint_interval_s(run) if self.restarts_from_checkpoint else None
        return StrategyChoice(self, f"strategy {self.name}, as asked", interval)

    # What it costs.

    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        """The expected goodput of a run, for `culm plan` and `auto`; None where the strategy cannot be used, or if it
        gives no estimate."""
        return None

    def estimate_for_auto(self, run: GoodputInputs) -> StrategyGoodput | None:
        """The estimate that `auto` compares."""
        return self.estimate(run)

    def advantage(self, run: GoodputInputs) -> str:
        """One clause that says why `auto` chose the strategy for a run."""
        return "it has the highest expected goodput"

    def zones_wanted(self, case: PlanCase) -> int:
        """Over how many zones the holders of a stage should be spread."""
        return case.pipelines if self.recovers_in_place else 1

    # How it is simulated.

    def simulated(self, context: SimulationContext) -> SimulatedStrategy:
        """A new strategy object for the simulator. By default: replicas recover lost work, and the shape changes by the
        reconfigure policy, as the leader of a real run does it."""
        from culm.sim.culm_strategies import ReconfiguringStrategy

        return ReconfiguringStrategy(context, self)

    # Which losses it survives.

    def survives(self, plan: Plan, lost_slots: Collection[int], *, workers_per_node: int = 1) -> bool:
        """Whether a run without checkpoints survives the loss of these slots, even if no replica is ever replaced. The
        fault kit draws faults from it. Slots share nodes in their order, as at the start of a run."""
        if not self.recovers_in_place:
            return not lost_slots
        nodes = {slot: slot // workers_per_node for slot in range(len(plan.workers))}
        shadows = shadows_on_other_nodes(self.initial_shadows(plan), plan, nodes)
        holders = (
            {*plan.holders_of(stage), *(shadow.slot for shadow in shadows if shadow.stage == stage)}
            for stage in range(plan.stages)
        )
        return all(slots.difference(lost_slots) for slots in holders)
