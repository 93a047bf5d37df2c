"""Estimate in closed form how fast a run trains when nodes are preempted: the parts that strategies share. Pure.

Each strategy has its own formula (`culm.strategies`). A closed form is needed because a table of hundreds of shapes can
not be simulated; `culm simulate` gives better numbers for single rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from culm.errors import PlanError
from culm.plan.replan.rebalance_failures import with_failures_by_stage
from culm.plan.replan.step_bound import step_lower_bound
from culm.schedule import Kind

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 60.0, 3600.0
"""Bounds of the time between two checkpoints. The upper one holds even if no loss is expected to need a checkpoint."""


REPLACE_S = 1500.0
"""Seconds from the loss of a node until another one has its slot. With this value 46 of 48 nodes are present on average
at 10 % preemptions per hour, as Bamboo's authors report. The default of plans and of generated markets."""


def present_share(preemption_rate: float, replace_s: float = REPLACE_S) -> float:
    """Share of the wanted nodes that are present in the long run, if so many of the present ones are lost per hour."""
    return 1 / (1 + preemption_rate / 3600 * replace_s)


@dataclass(frozen=True, kw_only=True)
class PreemptionRisk:
    """How often nodes are preempted, and what a preemption costs in seconds. Raises PlanError for an invalid number."""

    preemption_rate: float = 0.10
    """Preemptions per node and hour."""
    mean_group_size: float = 2.1
    """Nodes that are preempted together, on average, as in the published p3 trace."""
    replace_s: float = REPLACE_S
    """From the loss of a node until another one has its slot."""
    detect_s: float = 3.0
    decide_s: float = 0.5
    join_s: float = 2.0
    """Pause at the drained step boundary at which a newcomer takes its slot."""
    restart_s: float = 30.0
    """Ending and starting all processes."""
    checkpoint_stall_s: float = 1.0
    """How long an asynchronous checkpoint delays training."""
    storage_bandwidth: float = 1e9
    """Bytes per second of each node from and to checkpoint storage: nodes write and read their shards in parallel."""
    shadow_overhead: float = 0.07
    """Cost of keeping a shadow replica up to date, as a share of the step (Bamboo, lazy)."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            must_be_positive = f.name in ("mean_group_size", "storage_bandwidth")
            if not (math.isfinite(value) and value >= 0) or (must_be_positive and not value):
                raise PlanError(f"PreemptionRisk.{f.name} is {value}: use a finite number above 0")

    def loss_events_per_s(self, nodes: int) -> float:
        """Losses per second, a group that is lost together counted once."""
        return nodes * self.preemption_rate / self.mean_group_size / 3600

    def mean_missing_nodes(self, nodes: int) -> float:
        """Nodes that are lost and not replaced yet, on average."""
        return nodes * (1 - present_share(self.preemption_rate, self.replace_s))


@dataclass(frozen=True, kw_only=True)
class GoodputInputs:
    """A run whose goodput is to be estimated."""

    case: PlanCase
    """The shape and the costs of a step, without failures."""
    failure_free_step_s: float
    """Seconds of a step with every slot filled."""
    nodes: int
    state_bytes: float
    """Bytes of a checkpoint."""
    risk: PreemptionRisk

    @property
    def workers_per_node(self) -> float:
        return self.case.pipelines * self.case.stages / self.nodes

    @property
    def holder_nodes(self) -> int:
        """How many nodes hold a stage: one per pipeline, or fewer where a node has several pipelines."""
        return min(self.case.pipelines, self.nodes)

    @property
    def losses_of_one_stage(self) -> float:
        """How many workers of the same stage one loss takes, on average.

        The workers of a node run different stages, unless it has several pipelines. The nodes of a group run any part
        of a pipeline.
        """
        nodes_per_pipeline = max(1.0, self.case.stages / self.workers_per_node)
        pipelines_per_node = max(1.0, self.workers_per_node / self.case.stages)
        return pipelines_per_node * (1 + (self.risk.mean_group_size - 1) / nodes_per_pipeline)


class StrategyGoodput(NamedTuple):
    """The estimate for one strategy."""

    strategy: str
    step_s: float
    """Mean seconds of a step, with nodes missing now and then."""
    useful_share: float
    """Share of the time in which steps run that are not lost later."""
    checkpoint_interval_s: float
    """Best time between two checkpoints."""


class EstimatedStrategy(Protocol):
    """What a table of shapes has to know of a strategy; `culm.strategies.Strategy` has it."""

    name: str
    shadows_every_stage: bool
    keeps_outputs: bool
    eager_forwards: bool

    def estimate(self, run: GoodputInputs) -> StrategyGoodput | None:
        """The estimated goodput of a run; None where the strategy cannot be used or gives no estimate."""

    def zones_wanted(self, case: PlanCase) -> int:
        """Over how many zones the holders of a stage should be spread."""


def add_checkpoint_cost(
    name: str, run: GoodputInputs, *, step_s: float, pause_s: float, fatal_per_s: float
) -> StrategyGoodput:
    """The estimate of a strategy that pauses `pause_s` per loss and returns to a checkpoint `fatal_per_s` times a
    second. The checkpoint interval is the best one by Young's formula."""
    risk = run.risk
    write_s = run.state_bytes / (risk.storage_bandwidth * run.nodes)
    best = math.sqrt(2 * risk.checkpoint_stall_s / fatal_per_s) if fatal_per_s else _MAX_INTERVAL_S
    every = max(write_s, min(max(best, _MIN_INTERVAL_S), _MAX_INTERVAL_S))
    lost = fatal_per_s * (risk.detect_s + risk.restart_s + write_s + every / 2) + risk.checkpoint_stall_s / every
    return StrategyGoodput(name, step_s, max(0.0, 1 - risk.loss_events_per_s(run.nodes) * pause_s - lost), every)


def best_checkpoint_interval_s(run: GoodputInputs) -> float:
    """Best seconds between two checkpoints where every loss returns to one."""
    losses = run.risk.loss_events_per_s(run.nodes)
    step_s = run.failure_free_step_s
    return add_checkpoint_cost("", run, step_s=step_s, pause_s=0.0, fatal_per_s=losses).checkpoint_interval_s


def slowdown_with_missing_nodes(run: GoodputInputs) -> float:
    """How many times longer a step takes on average while nodes are missing, by its lower bound. The speed is
    interpolated between whole nodes, which are lost with all their workers."""
    case, missing = run.case, run.risk.mean_missing_nodes(run.nodes)
    most, low = case.stages * (case.pipelines - 1), math.floor(missing)
    lost = [0, *(min(most, round(nodes * run.workers_per_node)) for nodes in (low, low + 1))]
    ends = [_bound_with_failures(case, workers) for workers in lost]
    return mean_step_s(ends[1], ends[2], missing - low) / ends[0] if ends[0] else 1.0


def mean_step_s(usual_s: float, other_s: float, other_share: float) -> float:
    """Seconds of a step at the mean speed of a run in which steps take `other_s` for a share of the time."""
    return 1 / ((1 - other_share) / usual_s + other_share / other_s)


def _bound_with_failures(case: PlanCase, failures: int) -> float:
    """The lower bound of a step with failures spread evenly over the stages, those with the least work first."""
    price = case.action_costs
    order = sorted(range(case.stages), key=lambda s: price[Kind.F][s] + price[Kind.I][s] + price[Kind.W][s])
    lost = [0] * case.stages
    for n in range(failures):
        lost[order[n % case.stages]] += 1
    return step_lower_bound(with_failures_by_stage(case, lost))


def step_s_on_complete_pipelines(run: GoodputInputs, step_s: float) -> float:
    """Mean seconds of a step on as many complete pipelines as the present nodes can fill; the speed is interpolated
    between whole numbers of missing nodes.

    Where not even one is complete, the run waits; if that is so on average, whenever a node is missing.
    """
    case, missing = run.case, run.risk.mean_missing_nodes(run.nodes)
    full_s, low = step_lower_bound(case), math.floor(missing)

    def speed(nodes: int) -> float:
        left = math.floor(case.pipelines - nodes * run.workers_per_node / case.stages + 1e-9)
        return full_s / step_lower_bound(replace(case, pipelines=left)) if left >= 1 else 0.0

    mean = speed(low) + (speed(low + 1) - speed(low)) * (missing - low)
    return step_s / mean if speed(low) else step_s * math.exp(missing)


def slowest_stage_s(case: PlanCase) -> float:
    """Seconds of one micro-batch in the slowest stage, forward and backward."""
    price = case.action_costs
    return max(price[Kind.F][s] + price[Kind.I][s] + price[Kind.W][s] for s in range(case.stages))
