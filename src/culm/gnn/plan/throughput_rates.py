"""Throughput rates: dated inputs of the forecast, each with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from culm.errors import UsageError
from culm.gnn.plan.work_counts import GatherOrder


@dataclass(frozen=True)
class GpuRates:
    """Rates of a GPU: gathered elements and multiply-adds per second; `copies` is bytes of rows per second into and
    out of it."""

    gather: float
    dense: float
    copies: float = math.inf
    """Infinite if all training data stays on the GPU."""


@dataclass(frozen=True, kw_only=True)
class ThroughputRates:
    """Rates of one system on the machines of its time."""

    source: str
    order: GatherOrder
    gather: float
    """Elements per second and vCPU of a graph server."""
    dense: float
    """Multiply-adds per second and vCPU of a graph server."""
    frames: float
    """Bytes per second that a vCPU of a graph server sends to workers and receives from them."""
    network: float
    """Share of a machine's maximum network rate at which ghosts are exchanged."""
    cut: float
    """Share of a vertex's edges that a partition cuts, relative to a random partition (1)."""
    worker_dense: float
    """Multiply-adds per second of one worker."""
    worker_bytes: float
    """Bytes per second that one worker receives and sends."""
    worker_gb: float
    """Memory of one worker, as billed."""
    worker_life_s: float
    """Lifetime of a worker per request; 0 if every task is a request of its own."""
    call_s: float
    """Seconds from a ready task to its start on a worker, and back, without the transfer of the bytes."""
    pass_s: float
    """Fixed seconds of a layer, forward or backward: kernel launches and synchronization."""
    workers_per_server: int
    """Maximum workers per server."""
    devices: Mapping[str, GpuRates]
    rows: float
    """Elements per second and vCPU that a sampling system copies from the feature matrix."""
    draws: float
    """Neighbours per second and vCPU that a sampling system draws."""
    fresh: float = 0.15
    """Share of the visited vertices whose features a mini-batch has not fetched yet (assumed)."""
    fanout: tuple[int, ...] = (10, 10)
    extra_epochs: tuple[float, ...] = (1.08, 1.41)
    """Training epochs to the same accuracy, relative to synchronous training, by staleness (from the paper)."""


def rates_by_name(name: str) -> ThroughputRates:
    """Return rates by name. Raises UsageError for an unknown name."""
    if name not in THROUGHPUT_RATES:
        raise UsageError(f"there are no rates {name!r}: use {' or '.join(THROUGHPUT_RATES)}")
    return THROUGHPUT_RATES[name]


_H200 = GpuRates(gather=6.2e11, dense=2.0e13)
"""Measured: torch 2.11, sparse CSR times 64 columns; 500,000 x 300 times 300 x 64 in fp32."""
_BANDWIDTH = {"T4": 320, "L4": 300, "A10G": 600, "L40S": 864, "V100": 900, "A100": 1555, "H100": 3350, "H200": 4800}
"""Memory bandwidth in GB/s, which bounds a gather (data sheets)."""
_FP32 = {"T4": 8.1, "L4": 30.3, "A10G": 31.2, "L40S": 91.6, "V100": 15.7, "A100": 19.5, "H100": 66.9, "H200": 66.9}
"""TFLOP/s, which bound the products (data sheets)."""


def _rates_from_data_sheet(name: str) -> GpuRates:
    """Return the rates of a GPU that was not measured, scaled from the measured one by the data sheets."""
    return GpuRates(
        gather=_H200.gather * _BANDWIDTH[name] / _BANDWIDTH["H200"], dense=_H200.dense * _FP32[name] / _FP32["H200"]
    )


THROUGHPUT_RATES: dict[str, ThroughputRates] = {
    "paper": ThroughputRates(
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
        devices={"V100": GpuRates(gather=2.8e10, dense=3.0e12, copies=1.7e9)},
        rows=1.0e8,
        draws=2.0e6,
    ),
    "measured": ThroughputRates(
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
        devices={name: _rates_from_data_sheet(name) for name in _BANDWIDTH},
        rows=1.5e8,
        draws=5.0e6,
    ),
}
"""By name."""
