"""Seconds and dollars of a training epoch, for each system: pure arithmetic over work, rates and prices.

cpu        graph servers do everything, one step after another
elastic    workers do the dense work while the servers gather
gpu        everything on GPUs, ghosts through the network
sampling   mini-batches of sampled neighbourhoods on the same servers, features fetched from their owners
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from culm.gnn.plan.gnn_prices import GnnPrices, InstancePrice, value
from culm.gnn.plan.throughput_rates import ThroughputRates
from culm.gnn.plan.work_counts import EpochWork, GraphWorkload, count_epoch_work

Mode = Literal["sync", "pipe", "async"]

TARGET_TASK_S = 0.075
"""Target duration of a worker's task: long relative to its fixed cost, short enough for an even distribution."""
BYTES_PER_FLOAT = 4.0
GIB = 2.0**30
USABLE_MEMORY_SHARE = 0.8
"""Usable share of a machine's memory."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A training epoch of one system. `epochs` is the number of epochs to the same accuracy, relative to synchronous
    full-graph training."""

    system: str
    instance: str
    servers: int
    workers: int
    intervals: int
    """Intervals per server."""
    epoch_s: float
    epoch_usd: float
    epochs: float = 1.0
    split: dict[str, float]
    """Seconds by part; parts that overlap do not add up to the total."""

    @property
    def value(self) -> float:
        """Value V of the progress of one synchronous epoch."""
        return value(self.epoch_s * self.epochs, self.epoch_usd * self.epochs)


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """Everything that a forecast depends on."""

    shape: GraphWorkload
    rates: ThroughputRates
    prices: GnnPrices
    mode: Mode = "async"
    staleness: int = 0
    spot: bool = False

    @property
    def work(self) -> EpochWork:
        return count_epoch_work(self.shape, self.rates.order)

    def server_cost_usd(self, machine: InstancePrice, servers: int, seconds: float) -> float:
        return machine.hourly_usd(spot=self.spot) / 3600 * servers * seconds


def mean_ghost_copies(shape: GraphWorkload, servers: int, cut: float) -> float:
    """Return the mean number of other servers with a copy of a vertex: those that at least one of its cut edges
    leads to."""
    return (servers - 1) * (1 - (1 - 1 / servers) ** (cut * shape.degree)) if servers > 1 else 0.0


def forecast_cpu(inputs: ForecastInputs, machine: InstancePrice, servers: int) -> Forecast:
    """Forecast graph servers alone."""
    work, rates, cores = inputs.work, inputs.rates, servers * machine.vcpus
    split = {
        "gather": work.gather / (cores * rates.gather),
        "dense": work.macs / (cores * rates.dense),
        "ghosts": _ghost_exchange_s(inputs, machine, servers),
    }
    return _forecast_sequential("cpu", inputs, machine, servers, split)


def forecast_gpu(inputs: ForecastInputs, machine: InstancePrice, servers: int) -> Forecast:
    """Forecast GPUs alone. GPUs of one machine exchange ghosts for free: their links are far faster than any
    network."""
    work, device = inputs.work, inputs.rates.devices[machine.gpu]
    count = servers * machine.gpus
    split = {
        "gather": work.gather / (count * device.gather),
        "dense": work.macs / (count * device.dense),
        "copies": work.rows * BYTES_PER_FLOAT / (count * device.copies),
        "ghosts": _ghost_exchange_s(inputs, machine, servers),
    }
    return _forecast_sequential("gpu", inputs, machine, servers, split)


def forecast_elastic(inputs: ForecastInputs, machine: InstancePrice, servers: int, workers: int) -> Forecast:
    """Forecast graph servers with this total number of workers."""
    work, rates, cores = inputs.work, inputs.rates, servers * machine.vcpus
    busy = work.macs / rates.worker_dense + work.rows * BYTES_PER_FLOAT / rates.worker_bytes
    intervals = _choose_intervals(busy / work.calls, servers, workers)
    calls = intervals * servers * work.calls
    split = {
        "gather": work.gather / (cores * rates.gather),
        "ghosts": _ghost_exchange_s(inputs, machine, servers),
        "frames": work.rows * BYTES_PER_FLOAT / (cores * rates.frames),
        "workers": (busy + calls * rates.call_s) / workers,
        "passes": work.calls * rates.pass_s,
    }
    seconds = _overlapped_seconds(inputs, split, busy / (intervals * servers * work.calls) + rates.call_s)
    requests = workers * seconds / rates.worker_life_s if rates.worker_life_s else calls
    billed_s = workers * seconds if rates.worker_life_s else busy + calls * rates.call_s
    cost = inputs.server_cost_usd(machine, servers, seconds) + inputs.prices.elastic.cost(
        billed_s * rates.worker_gb, requests
    )
    return Forecast(
        system="elastic",
        instance=machine.instance,
        servers=servers,
        workers=workers,
        intervals=intervals,
        epoch_s=seconds,
        epoch_usd=cost,
        epochs=_extra_epochs(inputs),
        split=split,
    )


def forecast_sampling(inputs: ForecastInputs, machine: InstancePrice, servers: int) -> Forecast:
    """Forecast sampled mini-batches. The number of epochs is unchanged: the model does not predict the effect of
    sampling on accuracy."""
    shape, rates, cores = inputs.shape, inputs.rates, servers * machine.vcpus
    targets, visited, macs = shape.train_share * shape.vertices, 1.0, 0.0
    for fan, into, out in zip(_fanouts(rates, shape), shape.widths, shape.widths[1:], strict=False):
        visited *= 1 + fan
        macs += 3 * targets * visited / (1 + fan) * into * out
    fetched = targets * visited * shape.features * rates.fresh
    split = {
        "draw": targets * visited / (cores * rates.draws),
        "rows": fetched / (cores * rates.rows),
        "network": fetched * BYTES_PER_FLOAT * (1 - 1 / servers) / (servers * _network_bytes_per_s(inputs, machine)),
        "dense": macs / (cores * rates.dense),
    }
    return _forecast_sequential("sampling", inputs, machine, servers, split)


def best_elastic_forecast(inputs: ForecastInputs, machine: InstancePrice, servers: int) -> Forecast:
    """Return the forecast with the number of workers of the best value, up to the maximum that a server can serve."""
    maximum = servers * inputs.rates.workers_per_server
    powers = range(1, 1 + math.ceil(math.log(maximum, 1.1)))
    counts = sorted({min(maximum, math.ceil(1.1**power)) for power in powers})
    return max(
        (forecast_elastic(inputs, machine, servers, count) for count in counts), key=lambda forecast: forecast.value
    )


def fewest_servers(inputs: ForecastInputs, machine: InstancePrice) -> int:
    """Return the fewest machines whose memory (that of their GPUs, if any) holds the graph and its ghosts."""
    memory = machine.gpus * machine.gpu_gib if machine.gpus else machine.memory_gib
    work, width = inputs.work, max(inputs.shape.widths[1:])
    servers = 1
    while True:
        ghosts = (
            BYTES_PER_FLOAT * inputs.shape.vertices * mean_ghost_copies(inputs.shape, servers, inputs.rates.cut) * width
        )
        needed = math.ceil((work.held + ghosts) / (memory * GIB * USABLE_MEMORY_SHARE))
        if needed <= servers:
            return servers
        servers = max(servers + 1, min(needed, 2 * servers))


def _forecast_sequential(
    system: str, inputs: ForecastInputs, machine: InstancePrice, servers: int, split: dict[str, float]
) -> Forecast:
    """Forecast parts that run one after another."""
    split = split | {"passes": inputs.work.calls * inputs.rates.pass_s}
    seconds = sum(split.values())
    return Forecast(
        system=system,
        instance=machine.instance,
        servers=servers,
        workers=0,
        intervals=1,
        epoch_s=seconds,
        epoch_usd=inputs.server_cost_usd(machine, servers, seconds),
        split=split,
    )


def _ghost_exchange_s(inputs: ForecastInputs, machine: InstancePrice, servers: int) -> float:
    copies = inputs.shape.vertices * mean_ghost_copies(inputs.shape, servers, inputs.rates.cut)
    return copies * inputs.work.ghosts * BYTES_PER_FLOAT / (servers * _network_bytes_per_s(inputs, machine))


def _network_bytes_per_s(inputs: ForecastInputs, machine: InstancePrice) -> float:
    return machine.gbps * 1e9 / 8 * inputs.rates.network


def _choose_intervals(task_s: float, servers: int, workers: int) -> int:
    """Return the intervals per server: a task lasts about TARGET_TASK_S, and every worker has one while another is
    gathered."""
    return max(math.ceil(task_s / TARGET_TASK_S / servers), math.ceil(2 * workers / servers))


def _overlapped_seconds(inputs: ForecastInputs, split: dict[str, float], task_s: float) -> float:
    """Return the seconds of an epoch. Sync overlaps nothing; pipe overlaps within a layer, at whose end workers
    drain; async overlaps everything."""
    served = split["gather"] + split["ghosts"] + split["frames"] + split["passes"]
    if inputs.mode == "sync":
        return served + split["workers"]
    drained = inputs.work.calls * task_s if inputs.mode == "pipe" else 0.0
    return max(served, split["workers"]) + drained


def _extra_epochs(inputs: ForecastInputs) -> float:
    factors = inputs.rates.extra_epochs
    return factors[min(inputs.staleness, len(factors) - 1)] if inputs.mode == "async" else 1.0


def _fanouts(rates: ThroughputRates, shape: GraphWorkload) -> tuple[int, ...]:
    """Return the neighbours sampled per hop, at most the mean degree."""
    fans = (rates.fanout * shape.layers)[: shape.layers]
    return tuple(min(fan, max(1, round(shape.degree))) for fan in fans)
