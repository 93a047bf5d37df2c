"""What graph training would take and cost, before anything is rented. Pure: no torch, no network.

work      an epoch in counts: gathered elements, multiply-adds, floats on the wire
rates     how fast things are, each with its source
forecast  seconds and dollars of an epoch: CPUs alone, with elastic workers, on GPUs, by sampling
choose    a plan: servers, intervals, workers, and whether another way is worth more
shapes    the statistics of a graph, by name, numbers, file or generator
paper     the published table, beside the forecast for the same clusters
"""

from culm.gnn.plan.choose import Plan, plan
from culm.gnn.plan.forecast import Forecast, Setting
from culm.gnn.plan.rates import RATES, Rates, rates_of
from culm.gnn.plan.shapes import NAMED, shape_of
from culm.gnn.plan.work import Shape, Work, epoch_work

__all__ = [
    "NAMED",
    "RATES",
    "Forecast",
    "Plan",
    "Rates",
    "Setting",
    "Shape",
    "Work",
    "epoch_work",
    "plan",
    "rates_of",
    "shape_of",
]
