"""Base classes of simulated strategies: the context they run in, and the choice between alternatives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from culm.plan.reshape.reconfigure_policy import find_reconfigure_policy
from culm.sim.engine import StrategyResponse
from culm.sim.recovery_cost import RecoveryCost
from culm.sim.shape_step_times import ShapeStepTimes
from culm.sim.slot_table import SlotTable
from culm.sim.step_times import StepTimes

if TYPE_CHECKING:
    from culm.plan import Slot
    from culm.sim.cluster_costs import ClusterCosts
    from culm.sim.engine import SimulatedNode
    from culm.sim.workload import Workload


@dataclass(frozen=True)
class SimulationContext:
    """The workload, the costs of disturbances, and step times, shared by all strategies of a study."""

    workload: Workload
    cluster_costs: ClusterCosts
    step_times: StepTimes
    recovery_cost: RecoveryCost
    shape_step_times: ShapeStepTimes
    reconfigure_policy: str = "cost"
    """The policy by which culm's own strategies change their shape: cost, bamboo or never."""
    as_published: bool = False
    """Published systems run 1F1B, as in their papers; otherwise the schedule of the workload, like all strategies."""

    @classmethod
    def create(
        cls, workload: Workload, charges: ClusterCosts, reconfigure: str = "cost", *, as_published: bool = False
    ) -> SimulationContext:
        """Raises PlanError for an unknown policy."""
        find_reconfigure_policy(reconfigure)
        steps = StepTimes(workload, charges)
        return cls(workload, charges, steps, RecoveryCost(steps), ShapeStepTimes(steps), reconfigure, as_published)

    def published_step_s(self, pipelines: int) -> float:
        """Seconds of a step of a published system with every slot filled."""
        steps = self.step_times
        return steps.one_f_one_b(pipelines) if self.as_published else steps.healthy(pipelines)

    def samples_per_s(self, step_s: float) -> float:
        """Samples per second."""
        return self.workload.samples / step_s if step_s > 0 else 0.0


@dataclass(frozen=True)
class Alternative:
    """One way to continue: its rate, and the pauses before it."""

    reason: str
    rate: float
    pauses: dict[str, float] = field(default_factory=dict)
    apply: Callable[[], object] = lambda: None
    """Called if the alternative is taken."""
    completes_step: bool = False
    """Whether the open step is completed first."""

    def expected_samples(self, expected_s: float) -> float:
        """Samples trained until the next event."""
        return self.rate * max(0.0, expected_s - sum(self.pauses.values()))


class SimulatedStrategy(ABC):
    """A strategy in the simulator. It writes checkpoints, which are needed at least when a layer has no holder left.

    The engine sets `now`, `phase`, `step`, `remaining_s` and `expected_event_gap_s` before each call.
    """

    def __init__(self, context: SimulationContext) -> None:
        self.context = context
        self.workload, self.cluster_costs, self.step_times = context.workload, context.cluster_costs, context.step_times
        self.checkpoint_write_s = self.cluster_costs.load_s(self.workload)
        self.checkpoint_every_s = max(self.cluster_costs.checkpoint_every_s, self.checkpoint_write_s)
        self.checkpoint_stall_s = self.cluster_costs.stall_s
        self.expected_event_gap_s = self.now = self.remaining_s = 0.0
        self.phase, self.step = 0.0, 0
        self.recheck_after_steps = 0
        """The engine calls `on_recheck` after this many steps without an event; 0: never."""

    @abstractmethod
    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        """Nodes were lost together. None: training continues as before."""

    @abstractmethod
    def on_nodes_joined(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        """Nodes are ready to join. None: training continues as before."""

    def on_recheck(self) -> StrategyResponse | None:
        """No event happened for `recheck_after_steps` steps. None: training continues as before."""
        return None

    def take_best(self, alternatives: Sequence[Alternative]) -> StrategyResponse:
        """Take the alternative that trains most samples until the next expected event; of equals the first."""
        chosen = max(alternatives, key=lambda alternative: alternative.expected_samples(self.expected_event_gap_s))
        chosen.apply()
        return StrategyResponse(chosen.rate, chosen.pauses, reason=chosen.reason, completes_step=chosen.completes_step)

    def reload_checkpoint(self, rate: float) -> StrategyResponse:
        """Restart all nodes from the newest checkpoint."""
        pauses = {
            **self.cluster_costs.detection_pauses,
            "restart": self.cluster_costs.restart_s,
            "load": self.cluster_costs.load_s(self.workload),
        }
        return StrategyResponse(rate, pauses, "checkpoint", "restart from the checkpoint")


class FixedDepthStrategy(SimulatedStrategy):
    """A strategy whose pipelines all have the planned depth."""

    spread_zones: ClassVar[bool] = False

    def __init__(self, context: SimulationContext) -> None:
        super().__init__(context)
        self.slots = SlotTable(self.workload.stages, self.workload.pipelines, spread_zones=self.spread_zones)
        self.has_started = False
        self.lost_slots: list[Slot] = []

    def on_nodes_lost(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        self.lost_slots = self.slots.remove(nodes)
        return self.after_loss() if self.lost_slots else None

    def on_nodes_joined(self, nodes: Sequence[SimulatedNode]) -> StrategyResponse | None:
        self.slots.add(nodes)
        if self.slots.pipelines:
            return self.after_join()
        if not self.slots.fillable_pipelines:
            return None
        return self.start()

    def start(self) -> StrategyResponse:
        """Start the run; later, after too few nodes were present to hold the model, restart it from the checkpoint."""
        again, self.has_started = self.has_started, True
        self.slots.rebuild_pipelines()
        if again:
            return self.reload_checkpoint(self.samples_per_s())
        return StrategyResponse(self.samples_per_s(), {"start": self.cluster_costs.restart_s}, reason="start")

    @abstractmethod
    def after_loss(self) -> StrategyResponse:
        """Respond to a loss: the slots in `self.lost_slots` have just become empty."""

    @abstractmethod
    def after_join(self) -> StrategyResponse | None:
        """Respond to nodes that joined and stand by. None: training continues as before."""

    def step_s(self) -> float:
        """Seconds of a step in the current state."""
        return self.step_times.healthy(self.slots.pipelines)

    def samples_per_s(self) -> float:
        return self.context.samples_per_s(self.step_s()) if self.slots.pipelines else 0.0

    def restart(self) -> StrategyResponse:
        """Restart from the checkpoint on as many pipelines as there are nodes for: a layer has no holder left."""
        self.slots.rebuild_pipelines()
        return self.reload_checkpoint(self.samples_per_s())
