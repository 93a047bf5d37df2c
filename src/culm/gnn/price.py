"""What a run costs: dated prices of servers and elastic workers, and the value V = 1 / (time x cost).

Prices are data with a date and a source; nothing is looked up. Dollars of US regions.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from culm.errors import UsageError

HOUR_S = 3600.0


@dataclass(frozen=True)
class Machine:
    """A type of server. `gbps` is what its network reaches at best, `gpu_gib` the memory of one of its GPUs."""

    instance: str
    vcpus: int
    memory_gib: float
    gbps: float
    usd_h: float
    spot_usd_h: float | None = None
    gpu: str = ""
    gpus: int = 0
    gpu_gib: float = 0.0

    def hourly(self, *, spot: bool = False) -> float:
        """Dollars an hour. Raises UsageError where no spot price is known."""
        if not spot:
            return self.usd_h
        if self.spot_usd_h is None:
            raise UsageError(f"no spot price of {self.instance} is known: leave out --spot, or take another instance")
        return self.spot_usd_h


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """What a worker on AWS Lambda costs. Billed by the millisecond while it lives, busy or not."""

    usd_gb_s: float
    usd_request: float

    def cost(self, gb_s: float, requests: float) -> float:
        return gb_s * self.usd_gb_s + requests * self.usd_request


@dataclass(frozen=True, kw_only=True)
class Prices:
    """All prices of a day."""

    as_of: str
    source: str
    machines: Mapping[str, Machine]
    elastic: Elastic

    def machine(self, instance: str) -> Machine:
        """A type of server by name. Raises UsageError with the nearest name, or all."""
        if instance in self.machines:
            return self.machines[instance]
        close = difflib.get_close_matches(instance, self.machines, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(self.machines)}"
        raise UsageError(f"no price of instance {instance!r} as of {self.as_of} is known: {hint}")


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What a run cost, by whom it was earned."""

    servers_usd: float
    workers_usd: float
    requests_usd: float

    @property
    def usd(self) -> float:
        return self.servers_usd + self.workers_usd + self.requests_usd


def bill(
    prices: Prices,
    *,
    instance: str,
    server_s: float,
    worker_gb_s: float = 0.0,
    requests: float = 0.0,
    spot: bool = False,
) -> Bill:
    """The bill for server seconds (all servers together), GB-seconds of workers, and requests that started them."""
    for name, amount in {"server_s": server_s, "worker_gb_s": worker_gb_s, "requests": requests}.items():
        if not (math.isfinite(amount) and amount >= 0):
            raise UsageError(f"{name} is {amount}: use a number of at least 0")
    return Bill(
        servers_usd=server_s / HOUR_S * prices.machine(instance).hourly(spot=spot),
        workers_usd=prices.elastic.cost(worker_gb_s, 0),
        requests_usd=prices.elastic.cost(0, requests),
    )


def value(seconds: float, usd: float) -> float:
    """V = 1 / (time x cost): twice as fast for the same money is worth twice as much, and so is half the money."""
    if not (seconds > 0 and usd > 0):
        raise UsageError(f"time is {seconds} s and cost {usd} $: value needs both above 0")
    return 1.0 / (seconds * usd)


def prices_of(year: str = "2026") -> Prices:
    """Prices by the year of their date. Raises UsageError for a year without any."""
    if year not in PRICES:
        raise UsageError(f"no prices of {year!r} are known: there is {', '.join(PRICES)}")
    return PRICES[year]


def _by_name(machines: Iterable[Machine]) -> dict[str, Machine]:
    return {machine.instance: machine for machine in machines}


_CPU = (
    Machine("c5.xlarge", 4, 8, 10, 0.17),
    Machine("c5.2xlarge", 8, 16, 10, 0.34),
    Machine("c5.4xlarge", 16, 32, 10, 0.68),
    Machine("c5n.xlarge", 4, 10.5, 25, 0.216),
    Machine("c5n.2xlarge", 8, 21, 25, 0.432, 0.1764),
    Machine("c5n.4xlarge", 16, 42, 25, 0.864),
    Machine("c5n.9xlarge", 36, 96, 50, 1.944),
    Machine("r5.2xlarge", 8, 64, 10, 0.504),
    Machine("r5.4xlarge", 16, 128, 10, 1.008),
)
"""On-demand prices of these families have not moved since they were introduced; the spot price is of 2026."""

_V100 = (
    Machine("p3.2xlarge", 8, 61, 10, 3.06, None, "V100", 1, 16),
    Machine("p3.8xlarge", 32, 244, 10, 12.24, None, "V100", 4, 16),
    Machine("p3.16xlarge", 64, 488, 25, 24.48, None, "V100", 8, 16),
)

_LAMBDA = Elastic(usd_gb_s=0.0000166667, usd_request=0.20 / 1e6)

PRICES: dict[str, Prices] = {
    "2021": Prices(
        as_of="2021-07-14",
        source="AWS on-demand, US East, as in the Dorylus paper (OSDI'21)",
        machines=_by_name((*_CPU, *_V100)),
        elastic=_LAMBDA,
    ),
    "2026": Prices(
        as_of="2026-08-22",
        source="SkyPilot catalogue: AWS on-demand and median spot over US zones; CPU families but c5n.2xlarge: 2021",
        machines=_by_name(
            (
                *_CPU,
                Machine("g4dn.xlarge", 4, 16, 25, 0.526, 0.2289, "T4", 1, 16),
                Machine("g5.xlarge", 4, 16, 10, 1.006, 0.5091, "A10G", 1, 24),
                Machine("g6.xlarge", 4, 16, 10, 0.8048, 0.5587, "L4", 1, 24),
                Machine("g6e.xlarge", 4, 32, 20, 1.861, 1.4874, "L40S", 1, 48),
                Machine("p4d.24xlarge", 96, 1152, 400, 21.95764, 16.4434, "A100", 8, 40),
                Machine("p5.4xlarge", 16, 256, 100, 6.88, 2.6295, "H100", 1, 80),
                Machine("p5.48xlarge", 192, 2048, 3200, 55.04, 20.6328, "H100", 8, 80),
                Machine("p5en.48xlarge", 192, 2048, 3200, 63.296, 26.9176, "H200", 8, 141),
            )
        ),
        elastic=_LAMBDA,
    ),
}
"""By year."""
