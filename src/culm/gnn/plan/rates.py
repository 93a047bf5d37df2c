"""How fast things are: dated inputs of the forecast, each with where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from culm.errors import UsageError
from culm.gnn.plan.work import Order


@dataclass(frozen=True)
class Device:
    """A GPU: elements gathered and multiply-adds, a second; `copies` are bytes of rows moved in and out of it."""

    gather: float
    dense: float
    copies: float = math.inf
    """Infinite where all that is trained on stays on the GPU."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of one system on the machines of its time."""

    source: str
    order: Order
    gather: float
    """Elements a second, per vCPU of a graph server."""
    dense: float
    """Multiply-adds a second, per vCPU of a graph server."""
    frames: float
    """Bytes a second that a vCPU of a graph server serves to workers and takes from them."""
    network: float
    """Share of a machine's best network rate that ghosts are exchanged at."""
    cut: float
    """Share of a vertex's edges that a partition leaves cut, beside what chance would: 1 is a random partition."""
    worker_dense: float
    """Multiply-adds a second of one worker."""
    worker_bytes: float
    """Bytes a second that one worker receives and sends."""
    worker_gb: float
    """Memory of one worker, as billed."""
    worker_life_s: float
    """How long a worker serves for one request; 0: every task is a request of its own."""
    call_s: float
    """From a task's being ready to the worker's starting on it, and back, without the bytes."""
    pass_s: float
    """What a layer costs forward or backward however small it is: starting kernels, waiting for each other."""
    workers_per_server: int
    """At most."""
    devices: Mapping[str, Device]
    rows: float
    """Elements a second and vCPU that a sampling system copies out of the feature matrix."""
    draws: float
    """Neighbours a second and vCPU that it draws."""
    fresh: float = 0.15
    """Share of the visited vertices whose features a mini-batch has not fetched yet (assumed)."""
    fanout: tuple[int, ...] = (10, 10)
    extra_epochs: tuple[float, ...] = (1.08, 1.41)
    """Epochs to the same accuracy, beside synchronous training, by staleness (the paper)."""


def rates_of(name: str) -> Rates:
    """Rates by name. Raises UsageError for a name that is none."""
    if name not in RATES:
        raise UsageError(f"there are no rates {name!r}: use {' or '.join(RATES)}")
    return RATES[name]


_H200 = Device(gather=6.2e11, dense=2.0e13)
"""Measured: torch 2.11, sparse CSR times 64 columns; 500,000 x 300 times 300 x 64 in fp32."""
_BANDWIDTH = {"T4": 320, "L4": 300, "A10G": 600, "L40S": 864, "V100": 900, "A100": 1555, "H100": 3350, "H200": 4800}
"""GB/s of memory, which bounds a gather (data sheets)."""
_FP32 = {"T4": 8.1, "L4": 30.3, "A10G": 31.2, "L40S": 91.6, "V100": 15.7, "A100": 19.5, "H100": 66.9, "H200": 66.9}
"""TFLOP/s, which bound the products (data sheets)."""


def _scaled(name: str) -> Device:
    """A GPU that was not measured: the measured one, in proportion to the data sheets."""
    return Device(
        gather=_H200.gather * _BANDWIDTH[name] / _BANDWIDTH["H200"], dense=_H200.dense * _FP32[name] / _FP32["H200"]
    )


RATES: dict[str, Rates] = {
    "paper": Rates(
        source="fitted to the ratios of the four published runs of Dorylus (12 figures, 5 rates: dense, frames, "
        "worker_dense, the GPU's gather and copies) with a penalty on a wrong direction against CPUs, the others "
        "assumed; not measured by us",
        order="gather-first",
        gather=5.0e8,
        dense=1.23e9,
        frames=8.7e8,
        network=0.7,
        cut=0.02,
        worker_dense=3.0e9,
        worker_bytes=1.0e8,
        worker_gb=0.1875,
        worker_life_s=0.0,
        call_s=0.02,
        pass_s=0.0,
        workers_per_server=100,
        devices={"V100": Device(gather=2.8e10, dense=3.0e12, copies=1.7e9)},
        rows=1.0e8,
        draws=2.0e6,
    ),
    "measured": Rates(
        source="kernels measured on 16 cores of a Xeon (torch 2.11) and on an H200, other GPUs by data sheet; "
        "Lambda's network by AWS; frames, network, cut, pass_s and sampling assumed",
        order="cheapest",
        gather=6.9e8,
        dense=2.2e10,
        frames=1.0e9,
        network=0.5,
        cut=0.3,
        worker_dense=2.2e10,
        worker_bytes=7.5e7,
        worker_gb=1769 / 1024,
        worker_life_s=900.0,
        call_s=0.002,
        pass_s=0.0005,
        workers_per_server=100,
        devices={name: _scaled(name) for name in _BANDWIDTH},
        rows=1.5e8,
        draws=5.0e6,
    ),
}
"""By name."""
