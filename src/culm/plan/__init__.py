"""Planning: what a model costs, where to cut it, which shape to train it with, and how to continue after failures.

    model/    cost of each layer (measured or estimated), layer partition, choice of the pipeline shape
    replan/   plans for a step with failed slots: list scheduling, constraint programming, bounds, plan cache
    recover/  finishing an interrupted step: which workers stand in, what is recomputed, and where
    reshape/  another shape for the nodes that are left or have joined, and whether it pays
    rent/     which instances to rent, and the expected goodput of each strategy on them

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.plan.model.layer_partition import (
    Cuts,
    InFlight,
    in_flight_1f1b,
    partition_layers,
    segment_layer_ranges,
    stage_memory_bytes,
)
from culm.plan.model.model_profile import LayerCost, Profile
from culm.plan.model.shape_prediction import PipelineGrid, ShapeCandidate, peak_in_flight
from culm.plan.model.shape_search import DEFAULT_BANDWIDTH, ShapeChoice, choose_shape
from culm.plan.replan.cp_sat_planner import plan_optimal
from culm.plan.replan.explain_plan import explain_plan
from culm.plan.replan.failure_options import FailureOption, list_failure_options
from culm.plan.replan.greedy_planner import PlanSolution, plan_greedy
from culm.plan.replan.plan_cache import PlanCache
from culm.plan.replan.plan_case import ActivationLimit, PlanCase, Slot, fits_in_bubble
from culm.plan.replan.rebalance_failures import (
    FailuresByStage,
    RebalancedFailures,
    SlotMove,
    optimal_spread,
    rebalance_failures,
    with_failures_by_stage,
)
from culm.plan.replan.staggered_period import staggered_period
from culm.plan.replan.step_bound import step_lower_bound

__all__ = [
    "DEFAULT_BANDWIDTH",
    "ActivationLimit",
    "Cuts",
    "FailureOption",
    "FailuresByStage",
    "InFlight",
    "LayerCost",
    "PipelineGrid",
    "PlanCache",
    "PlanCase",
    "PlanSolution",
    "Profile",
    "RebalancedFailures",
    "ShapeCandidate",
    "ShapeChoice",
    "Slot",
    "SlotMove",
    "choose_shape",
    "explain_plan",
    "fits_in_bubble",
    "in_flight_1f1b",
    "list_failure_options",
    "optimal_spread",
    "partition_layers",
    "peak_in_flight",
    "plan_greedy",
    "plan_optimal",
    "rebalance_failures",
    "segment_layer_ranges",
    "stage_memory_bytes",
    "staggered_period",
    "step_lower_bound",
    "with_failures_by_stage",
]
