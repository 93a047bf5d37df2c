"""The simulator: what a run on machines that come and go would come to, with the planner that plans real runs.

    workload    what is trained: a shape, its times, its state
    known       models whose speed was published
    costs       what a disturbance costs: everything that is assumed about a cluster
    steps       seconds per step in each situation, by the planner
    shapes      ... in other shapes than the planned one
    engine      the clock: from event to event
    slots       who fills which slot
    strategy    what all strategies share
    led         reroute, the shadows and auto: every decision by the functions that a leader asks
    ours        culm's baselines    uneven     ... with pipelines of unequal depth
    published   those of others
    study       strategies side by side, with intervals
    pictures    nodes, throughput and cost over time
    bamboo      the simulator of Bamboo's authors, as they wrote it
    papers/     published tables, ours beside them

Everything here is a pure function of values: no torch, no clock, no sockets.
"""

from culm.sim.costs import Charges
from culm.sim.study import STRATEGIES, Outcome, Price, simulate
from culm.sim.workload import Workload, read_workload

__all__ = ["STRATEGIES", "Charges", "Outcome", "Price", "Workload", "read_workload", "simulate"]
