"""The published table of Dorylus (OSDI'21), beside the forecast for the same clusters at the prices of its time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from culm.gnn.plan.choose import Plan, plan
from culm.gnn.plan.forecast import Setting
from culm.gnn.plan.rates import rates_of
from culm.gnn.plan.shapes import NAMED
from culm.gnn.plan.work import Model
from culm.gnn.price import prices_of, value

GPU = "p3.2xlarge"


@dataclass(frozen=True)
class Published:
    """A row of the table: seconds and dollars to the same accuracy, on as many CPU as GPU machines."""

    graph: str
    model: Model
    instance: str
    servers: int
    elastic: tuple[float, float]
    cpu: tuple[float, float]
    gpu: tuple[float, float]

    def gain(self, system: str) -> float:
        """How many times the value of that system the elastic one had."""
        return value(*self.elastic) / value(*getattr(self, system))


# fmt: off
TABLE = (
    Published("reddit-small", "gcn", "c5.2xlarge",   2, (861,   0.20), (1005,  0.19), (163,   0.28)),
    Published("amazon",       "gcn", "c5n.2xlarge",  8, (513,   0.79), (710,   0.68), (385,   2.62)),
    Published("friendster",   "gcn", "c5n.4xlarge", 32, (1133, 13.80), (1991, 15.30), (1490, 40.50)),
    Published("amazon",       "gat", "c5n.2xlarge", 12, (853,   2.67), (2093,  3.01), (1039, 10.60)),
)
# fmt: on
"""Machines follow from the printed seconds and dollars: seconds x machines x price an hour gives each of them."""


def replayed(row: Published) -> Plan:
    """The forecast for a row: its graph, its machines, prices of 2021, rates fitted to the table."""
    shape = replace(NAMED[row.graph], model=row.model)
    setting = Setting(shape=shape, rates=rates_of("paper"), prices=prices_of("2021"))
    return plan(setting, instance=row.instance, servers=row.servers, gpu_instance=GPU, gpu_servers=row.servers)


def agrees(row: Published, found: Plan) -> bool:
    """Whether forecast and table say the same about which way is worth more."""
    return all((found.gain(system) > 1) == (row.gain(system) > 1) for system in ("cpu", "gpu"))
