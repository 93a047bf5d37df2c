"""Simulator: goodput and cost of a run on nodes that join and leave, using the same planner as real runs.

    workload, published_workload, analytic_workload   the job: its shape, times and state
    cluster_costs                                     all assumptions about detection, restarts, network and storage
    step_times, shape_step_times                      seconds per step in each situation, from the planner
    engine                                            the clock: from event to event
    slot_table                                        which node fills which slot
    simulated_strategy                                what all simulated strategies share
    culm_strategies, baseline_strategies              culm's strategies, with the leader's own decision functions
    paper_strategies, oobleck_strategy                published systems
    recovery_cost                                     what a loss costs, from the recovery planner
    compare_strategies                                strategies side by side, with confidence intervals
    run_charts                                        nodes, throughput and cost over time
    bamboo_simulator                                  the simulator of Bamboo's authors
    papers/                                           published tables next to simulated ones

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.sim.cluster_costs import ClusterCosts
from culm.sim.compare_strategies import NodePrice, StrategyOutcome, simulate
from culm.sim.workload import Workload, read_workload

__all__ = ["ClusterCosts", "NodePrice", "StrategyOutcome", "Workload", "read_workload", "simulate"]
