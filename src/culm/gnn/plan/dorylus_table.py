"""The published table of Dorylus (OSDI'21), and the forecast for the same clusters at the prices of its time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from culm.gnn.plan.epoch_forecast import ForecastInputs
from culm.gnn.plan.gnn_prices import prices_for_year, value
from culm.gnn.plan.graph_statistics import NAMED_GRAPHS
from culm.gnn.plan.throughput_rates import rates_by_name
from culm.gnn.plan.training_plan import GnnPlan, choose_plan
from culm.gnn.plan.work_counts import ModelKind

GPU_INSTANCE = "p3.2xlarge"


@dataclass(frozen=True)
class DorylusRow:
    """A row of the table: seconds and dollars to the same accuracy, on equally many CPU and GPU machines."""

    graph: str
    model: ModelKind
    instance: str
    servers: int
    elastic: tuple[float, float]
    cpu: tuple[float, float]
    gpu: tuple[float, float]

    def value_gain(self, system: str) -> float:
        """Return the value of the elastic system relative to that of `system`."""
        return value(*self.elastic) / value(*getattr(self, system))


# fmt: off
DORYLUS_TABLE = (
    DorylusRow("reddit-small", "gcn", "c5.2xlarge",   2, (861,   0.20), (1005,  0.19), (163,   0.28)),
    DorylusRow("amazon",       "gcn", "c5n.2xlarge",  8, (513,   0.79), (710,   0.68), (385,   2.62)),
    DorylusRow("friendster",   "gcn", "c5n.4xlarge", 32, (1133, 13.80), (1991, 15.30), (1490, 40.50)),
    DorylusRow("amazon",       "gat", "c5n.2xlarge", 12, (853,   2.67), (2093,  3.01), (1039, 10.60)),
)
# fmt: on
"""The number of machines follows from the printed figures: dollars = seconds x machines x hourly price."""


def forecast_row(row: DorylusRow) -> GnnPlan:
    """Return the forecast for a row: its graph and machines, prices of 2021, rates fitted to the table."""
    workload = replace(NAMED_GRAPHS[row.graph], model=row.model)
    inputs = ForecastInputs(shape=workload, rates=rates_by_name("paper"), prices=prices_for_year("2021"))
    return choose_plan(
        inputs, instance=row.instance, servers=row.servers, gpu_instance=GPU_INSTANCE, gpu_servers=row.servers
    )


def agrees_with_row(row: DorylusRow, plan: GnnPlan) -> bool:
    """Whether forecast and table agree on which system has the better value."""
    return all((plan.value_gain(system) > 1) == (row.value_gain(system) > 1) for system in ("cpu", "gpu"))
