"""Time and cost of graph training, before anything is rented. Pure: no torch, no network.

work_counts        the work of a training epoch: gathered elements, multiply-adds, floats sent
throughput_rates   rates of machines and workers, each with its source
epoch_forecast     seconds and dollars of a training epoch: CPUs alone, elastic workers, GPUs, sampling
training_plan      a plan: servers, intervals, workers, and whether another system has a better value
graph_statistics   the statistics of a graph, from a name, numbers, a file or a generator
gnn_prices         dated prices of servers and workers, and the value V = 1 / (time x cost)
dorylus_table      the published table of Dorylus next to the forecast for the same clusters
"""

from culm.gnn.plan.epoch_forecast import Forecast, ForecastInputs
from culm.gnn.plan.graph_statistics import NAMED_GRAPHS, workload_for_graph
from culm.gnn.plan.throughput_rates import THROUGHPUT_RATES, ThroughputRates, rates_by_name
from culm.gnn.plan.training_plan import GnnPlan, choose_plan
from culm.gnn.plan.work_counts import EpochWork, GraphWorkload, count_epoch_work

__all__ = [
    "NAMED_GRAPHS",
    "THROUGHPUT_RATES",
    "EpochWork",
    "Forecast",
    "ForecastInputs",
    "GnnPlan",
    "GraphWorkload",
    "ThroughputRates",
    "choose_plan",
    "count_epoch_work",
    "rates_by_name",
    "workload_for_graph",
]
