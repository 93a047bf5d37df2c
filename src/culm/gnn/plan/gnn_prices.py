"""Cost of a run: dated prices of servers and elastic workers, and the value V = 1 / (time x cost).

Prices are data with a date and a source; nothing is looked up. US dollars, US regions.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from culm.errors import UsageError

HOUR_S = 3600.0


@dataclass(frozen=True)
class InstancePrice:
    """An instance type. `gbps` is its maximum network rate, `gpu_gib` the memory of one of its GPUs."""

    instance: str
    vcpus: int
    memory_gib: float
    gbps: float
    usd_h: float
    spot_usd_h: float | None = None
    gpu: str = ""
    gpus: int = 0
    gpu_gib: float = 0.0

    def hourly_usd(self, *, spot: bool = False) -> float:
        """Return the dollars per hour. Raises UsageError if no spot price is known."""
        if not spot:
            return self.usd_h
        if self.spot_usd_h is None:
            raise UsageError(f"no spot price of {self.instance} is known: omit --spot, or use another instance")
        return self.spot_usd_h


@dataclass(frozen=True, kw_only=True)
class WorkerPrice:
    """Price of a worker on AWS Lambda, billed by the millisecond of its lifetime, busy or not."""

    usd_gb_s: float
    usd_request: float

    def cost(self, gb_s: float, requests: float) -> float:
        return gb_s * self.usd_gb_s + requests * self.usd_request


@dataclass(frozen=True, kw_only=True)
class GnnPrices:
    """All prices of a date."""

    as_of: str
    source: str
    machines: Mapping[str, InstancePrice]
    elastic: WorkerPrice

    def machine(self, instance: str) -> InstancePrice:
        """Return an instance type by name. Raises UsageError with the closest name, or all names."""
        if instance in self.machines:
            return self.machines[instance]
        close = difflib.get_close_matches(instance, self.machines, n=1)
        hint = f"did you mean {close[0]}?" if close else f"use {', '.join(self.machines)}"
        raise UsageError(f"no price of instance {instance!r} as of {self.as_of} is known: {hint}")


@dataclass(frozen=True, kw_only=True)
class Bill:
    """Cost of a run, by what was paid for."""

    servers_usd: float
    workers_usd: float
    requests_usd: float

    @property
    def usd(self) -> float:
        return self.servers_usd + self.workers_usd + self.requests_usd


def compute_bill(
    prices: GnnPrices,
    *,
    instance: str,
    server_s: float,
    worker_gb_s: float = 0.0,
    requests: float = 0.0,
    spot: bool = False,
) -> Bill:
    """Return the bill for server seconds (of all servers together), GB-seconds of workers, and requests that started
    them."""
    for name, amount in {"server_s": server_s, "worker_gb_s": worker_gb_s, "requests": requests}.items():
        if not (math.isfinite(amount) and amount >= 0):
            raise UsageError(f"{name} is {amount}: use a number of at least 0")
    return Bill(
        servers_usd=server_s / HOUR_S * prices.machine(instance).hourly_usd(spot=spot),
        workers_usd=prices.elastic.cost(worker_gb_s, 0),
        requests_usd=prices.elastic.cost(0, requests),
    )


def value(seconds: float, usd: float) -> float:
    """V = 1 / (time x cost): half the time for the same cost has twice the value, and so has half the cost for the
    same time."""
    if not (seconds > 0 and usd > 0):
        raise UsageError(f"time is {seconds} s and cost {usd} $: value needs both above 0")
    return 1.0 / (seconds * usd)


def prices_for_year(year: str = "2026") -> GnnPrices:
    """Return the prices of a year. Raises UsageError for a year without prices."""
    if year not in PRICES:
        raise UsageError(f"no prices of {year!r} are known: use {', '.join(PRICES)}")
    return PRICES[year]


def _by_name(machines: Iterable[InstancePrice]) -> dict[str, InstancePrice]:
    return {machine.instance: machine for machine in machines}


_CPU = (
    InstancePrice("c5.xlarge", 4, 8, 10, 0.17),
    InstancePrice("c5.2xlarge", 8, 16, 10, 0.34),
    InstancePrice("c5.4xlarge", 16, 32, 10, 0.68),
    InstancePrice("c5n.xlarge", 4, 10.5, 25, 0.216),
    InstancePrice("c5n.2xlarge", 8, 21, 25, 0.432, 0.1764),
    InstancePrice("c5n.4xlarge", 16, 42, 25, 0.864),
    InstancePrice("c5n.9xlarge", 36, 96, 50, 1.944),
    InstancePrice("r5.2xlarge", 8, 64, 10, 0.504),
    InstancePrice("r5.4xlarge", 16, 128, 10, 1.008),
)
"""On-demand prices of these families have not changed since their introduction; the spot price is of 2026."""

_V100 = (
    InstancePrice("p3.2xlarge", 8, 61, 10, 3.06, None, "V100", 1, 16),
    InstancePrice("p3.8xlarge", 32, 244, 10, 12.24, None, "V100", 4, 16),
    InstancePrice("p3.16xlarge", 64, 488, 25, 24.48, None, "V100", 8, 16),
)

_LAMBDA = WorkerPrice(usd_gb_s=0.0000166667, usd_request=0.20 / 1e6)

PRICES: dict[str, GnnPrices] = {
    "2021": GnnPrices(
        as_of="2021-07-14",
        source="AWS on-demand, US East, as in the Dorylus paper (OSDI'21)",
        machines=_by_name((*_CPU, *_V100)),
        elastic=_LAMBDA,
    ),
    "2026": GnnPrices(
        as_of="2026-08-22",
        source="SkyPilot catalogue: AWS on-demand and median spot over US zones; CPU families but c5n.2xlarge: 2021",
        machines=_by_name(
            (
                *_CPU,
                InstancePrice("g4dn.xlarge", 4, 16, 25, 0.526, 0.2289, "T4", 1, 16),
                InstancePrice("g5.xlarge", 4, 16, 10, 1.006, 0.5091, "A10G", 1, 24),
                InstancePrice("g6.xlarge", 4, 16, 10, 0.8048, 0.5587, "L4", 1, 24),
                InstancePrice("g6e.xlarge", 4, 32, 20, 1.861, 1.4874, "L40S", 1, 48),
                InstancePrice("p4d.24xlarge", 96, 1152, 400, 21.95764, 16.4434, "A100", 8, 40),
                InstancePrice("p5.4xlarge", 16, 256, 100, 6.88, 2.6295, "H100", 1, 80),
                InstancePrice("p5.48xlarge", 192, 2048, 3200, 55.04, 20.6328, "H100", 8, 80),
                InstancePrice("p5en.48xlarge", 192, 2048, 3200, 63.296, 26.9176, "H200", 8, 141),
            )
        ),
        elastic=_LAMBDA,
    ),
}
"""By year."""
