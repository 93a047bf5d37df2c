"""Seconds and dollars of an epoch, for each way to train: pure arithmetic over work, rates and prices.

cpu        graph servers do everything, one thing after another
elastic    workers do the tensor work while the servers gather
gpu        everything on GPUs, ghosts through the network
sampling   mini-batches of sampled neighbourhoods on the same servers, features from wherever they are
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from culm.gnn.plan.rates import Rates
from culm.gnn.plan.work import Shape, Work, epoch_work
from culm.gnn.price import Machine, Prices, value

Mode = Literal["sync", "pipe", "async"]

CALL_S = 0.075
"""What a task on a worker should last: long enough for its fixed costs, short enough to be spread evenly."""
BYTES = 4.0
GIB = 2.0**30
USABLE = 0.8
"""Of a machine's memory."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """An epoch of one system. `epochs` are those to the same accuracy beside synchronous full-graph training."""

    system: str
    instance: str
    servers: int
    workers: int
    intervals: int
    """Of each server."""
    epoch_s: float
    epoch_usd: float
    epochs: float = 1.0
    split: dict[str, float]
    """Where the seconds go; parts that overlap do not add up."""

    @property
    def value(self) -> float:
        """V for a job of one synchronous epoch's progress."""
        return value(self.epoch_s * self.epochs, self.epoch_usd * self.epochs)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything a forecast depends on."""

    shape: Shape
    rates: Rates
    prices: Prices
    mode: Mode = "async"
    staleness: int = 0
    spot: bool = False

    @property
    def work(self) -> Work:
        return epoch_work(self.shape, self.rates.order)

    def usd(self, machine: Machine, servers: int, seconds: float) -> float:
        return machine.hourly(spot=self.spot) / 3600 * servers * seconds


def replicas(shape: Shape, servers: int, cut: float) -> float:
    """Other servers that hold a copy of a vertex, on average: those that at least one cut edge of it leads to."""
    return (servers - 1) * (1 - (1 - 1 / servers) ** (cut * shape.degree)) if servers > 1 else 0.0


def cpu(setting: Setting, machine: Machine, servers: int) -> Forecast:
    """Graph servers alone."""
    work, rates, cores = setting.work, setting.rates, servers * machine.vcpus
    split = {
        "gather": work.gather / (cores * rates.gather),
        "dense": work.macs / (cores * rates.dense),
        "ghosts": _ghosts_s(setting, machine, servers),
    }
    return _in_turn("cpu", setting, machine, servers, split)


def gpu(setting: Setting, machine: Machine, servers: int) -> Forecast:
    """GPUs alone. Those of one machine exchange ghosts for free: their links are far faster than any network."""
    work, device = setting.work, setting.rates.devices[machine.gpu]
    count = servers * machine.gpus
    split = {
        "gather": work.gather / (count * device.gather),
        "dense": work.macs / (count * device.dense),
        "copies": work.rows * BYTES / (count * device.copies),
        "ghosts": _ghosts_s(setting, machine, servers),
    }
    return _in_turn("gpu", setting, machine, servers, split)


def elastic(setting: Setting, machine: Machine, servers: int, workers: int) -> Forecast:
    """Graph servers with that many workers altogether."""
    work, rates, cores = setting.work, setting.rates, servers * machine.vcpus
    busy = work.macs / rates.worker_dense + work.rows * BYTES / rates.worker_bytes
    intervals = _intervals(busy / work.calls, servers, workers)
    calls = intervals * servers * work.calls
    split = {
        "gather": work.gather / (cores * rates.gather),
        "ghosts": _ghosts_s(setting, machine, servers),
        "frames": work.rows * BYTES / (cores * rates.frames),
        "workers": (busy + calls * rates.call_s) / workers,
        "passes": work.calls * rates.pass_s,
    }
    seconds = _together(setting, split, busy / (intervals * servers * work.calls) + rates.call_s)
    requests = workers * seconds / rates.worker_life_s if rates.worker_life_s else calls
    lived = workers * seconds if rates.worker_life_s else busy + calls * rates.call_s
    cost = setting.usd(machine, servers, seconds) + setting.prices.elastic.cost(lived * rates.worker_gb, requests)
    return Forecast(
        system="elastic",
        instance=machine.instance,
        servers=servers,
        workers=workers,
        intervals=intervals,
        epoch_s=seconds,
        epoch_usd=cost,
        epochs=_extra(setting),
        split=split,
    )


def sampling(setting: Setting, machine: Machine, servers: int) -> Forecast:
    """Mini-batches. No epochs are added or taken off: what sampling does to accuracy is not this model's to say."""
    shape, rates, cores = setting.shape, setting.rates, servers * machine.vcpus
    targets, visited, macs = shape.train_share * shape.vertices, 1.0, 0.0
    for fan, into, out in zip(_fans(rates, shape), shape.widths, shape.widths[1:], strict=False):
        visited *= 1 + fan
        macs += 3 * targets * visited / (1 + fan) * into * out
    fetched = targets * visited * shape.features * rates.fresh
    split = {
        "draw": targets * visited / (cores * rates.draws),
        "rows": fetched / (cores * rates.rows),
        "network": fetched * BYTES * (1 - 1 / servers) / (servers * _bytes_s(setting, machine)),
        "dense": macs / (cores * rates.dense),
    }
    return _in_turn("sampling", setting, machine, servers, split)


def best_elastic(setting: Setting, machine: Machine, servers: int) -> Forecast:
    """The number of workers with the best value, up to the most that a server can feed."""
    most = servers * setting.rates.workers_per_server
    counts = sorted({min(most, math.ceil(1.1**power)) for power in range(1, 1 + math.ceil(math.log(most, 1.1)))})
    return max((elastic(setting, machine, servers, count) for count in counts), key=lambda found: found.value)


def servers_for(setting: Setting, machine: Machine) -> int:
    """The fewest machines whose memory (their GPUs' where they have some) holds the graph with its ghosts."""
    memory = machine.gpus * machine.gpu_gib if machine.gpus else machine.memory_gib
    work, width = setting.work, max(setting.shape.widths[1:])
    servers = 1
    while True:
        ghosts = BYTES * setting.shape.vertices * replicas(setting.shape, servers, setting.rates.cut) * width
        needed = math.ceil((work.held + ghosts) / (memory * GIB * USABLE))
        if needed <= servers:
            return servers
        servers = max(servers + 1, min(needed, 2 * servers))


def _in_turn(system: str, setting: Setting, machine: Machine, servers: int, split: dict[str, float]) -> Forecast:
    """One thing after another."""
    split = split | {"passes": setting.work.calls * setting.rates.pass_s}
    seconds = sum(split.values())
    return Forecast(
        system=system,
        instance=machine.instance,
        servers=servers,
        workers=0,
        intervals=1,
        epoch_s=seconds,
        epoch_usd=setting.usd(machine, servers, seconds),
        split=split,
    )


def _ghosts_s(setting: Setting, machine: Machine, servers: int) -> float:
    copies = setting.shape.vertices * replicas(setting.shape, servers, setting.rates.cut)
    return copies * setting.work.ghosts * BYTES / (servers * _bytes_s(setting, machine))


def _bytes_s(setting: Setting, machine: Machine) -> float:
    return machine.gbps * 1e9 / 8 * setting.rates.network


def _intervals(task_s: float, servers: int, workers: int) -> int:
    """Enough that a task lasts about CALL_S, and that every worker has one while another is gathered."""
    return max(math.ceil(task_s / CALL_S / servers), math.ceil(2 * workers / servers))


def _together(setting: Setting, split: dict[str, float], task_s: float) -> float:
    """What overlaps in each mode: nothing, all within a layer (workers drain at its end), or all."""
    served = split["gather"] + split["ghosts"] + split["frames"] + split["passes"]
    if setting.mode == "sync":
        return served + split["workers"]
    drained = setting.work.calls * task_s if setting.mode == "pipe" else 0.0
    return max(served, split["workers"]) + drained


def _extra(setting: Setting) -> float:
    known = setting.rates.extra_epochs
    return known[min(setting.staleness, len(known) - 1)] if setting.mode == "async" else 1.0


def _fans(rates: Rates, shape: Shape) -> tuple[int, ...]:
    """Neighbours drawn per hop: never more than there are."""
    fans = (rates.fanout * shape.layers)[: shape.layers]
    return tuple(min(fan, max(1, round(shape.degree))) for fan in fans)
