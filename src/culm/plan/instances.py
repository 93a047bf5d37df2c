"""What accelerators can do, and how instances are connected: vendors' figures, as of August 2026.

Prices are no part of this: they move, and `culm.market` has them with their dates.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from culm.errors import PlanError

AS_OF = "2026-08"

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Device:
    """An accelerator. Rates are peaks, of dense matrices; `EFFICIENCY` is what training gets out of them."""

    name: str
    fp32: float
    """FLOP per second without tensor cores."""
    half: float
    """FLOP per second of the tensor cores, in bf16; in fp16 where there is no bf16 (V100, T4)."""
    bandwidth: float
    """Bytes per second from and to its memory."""
    memory: int
    """Bytes."""

    def peak(self, precision: str) -> float:
        return self.half if precision == "bf16" else self.fp32


EFFICIENCY = {"fp32": 0.55, "bf16": 0.45}
"""Share of the peak that large matrix products reach in training."""
STREAMING = 0.8
"""Share of the memory bandwidth that the rest reaches."""
LAUNCH_S = 60e-6
"""What a layer costs however little it has to do: about ten kernels."""
USABLE = 0.92
"""Share of the memory that is left beside the context, fragmentation and buffers of the libraries."""


def _device(name: str, fp32: float, half: float, bandwidth: float, gib: float) -> Device:
    return Device(name, fp32 * _TERA, half * _TERA, bandwidth * _GIGA, int(gib * GIB))


DEVICES = {
    device.name: device
    for device in (
        _device("V100", 15.7, 125, 900, 16),
        _device("V100-32GB", 15.7, 125, 900, 32),
        _device("T4", 8.1, 65, 300, 16),
        _device("L4", 30.3, 121, 300, 24),
        _device("A10G", 31.5, 70, 600, 24),
        _device("L40S", 91.6, 362, 864, 48),
        _device("A100", 19.5, 312, 1555, 40),
        _device("A100-80GB", 19.5, 312, 2039, 80),
        _device("H100", 67.0, 989, 3350, 80),
        _device("H200", 67.0, 989, 4800, 141),
        _device("B200", 80.0, 2250, 8000, 180),
    )
}

NETWORK = {
    "p3.2xlarge": 10,
    "p3.8xlarge": 10,
    "p3.16xlarge": 25,
    "g4dn.xlarge": 25,
    "g4dn.12xlarge": 50,
    "g5.xlarge": 10,
    "g5.12xlarge": 40,
    "g5.48xlarge": 100,
    "g6.xlarge": 10,
    "g6e.xlarge": 20,
    "p4d.24xlarge": 400,
    "p4de.24xlarge": 400,
    "p5.4xlarge": 100,
    "p5.48xlarge": 3200,
    "p5en.48xlarge": 3200,
    "p6-b200.48xlarge": 3200,
    "n1-standard-8+1xV100": 16,
    "n1-standard-8+1xT4": 16,
    "g2-standard-4+1xL4": 10,
    "a2-highgpu-1g+1xA100": 24,
    "a2-highgpu-8g+8xA100": 100,
    "a2-ultragpu-1g+1xA100-80GB": 24,
    "a2-ultragpu-8g+8xA100-80GB": 100,
    "a3-highgpu-1g+1xH100": 25,
    "a3-highgpu-8g+8xH100": 1000,
    "a3-ultragpu-8g+8xH200": 3200,
    "Standard_NC4as_T4_v3": 8,
    "Standard_NC6s_v3": 8,
    "Standard_ND40rs_v2": 100,
    "Standard_NC24ads_A100_v4": 20,
    "Standard_ND96asr_v4": 1600,
    "Standard_ND96amsr_A100_v4": 1600,
    "Standard_NC40ads_H100_v5": 40,
    "Standard_ND96isr_H100_v5": 3200,
}
"""Gbit per second of an instance ("up to" where the vendor says so)."""

_UNKNOWN_GBIT = 10


def device(name: str) -> Device:
    """The accelerator of that name. Raises PlanError, with the nearest, for one that is not known."""
    by_name = {known.lower(): found for known, found in DEVICES.items()}
    if name.lower() not in by_name:
        close = difflib.get_close_matches(name.lower(), by_name, n=1)
        hint = f"did you mean {by_name[close[0]].name}?" if close else f"known are {', '.join(DEVICES)}"
        raise PlanError(f"there are no figures of the accelerator {name!r}: {hint}")
    return by_name[name.lower()]


def network(instance: str, devices: int) -> float:
    """Bytes per second that one worker of an instance gets to other instances: its share of what the instance has."""
    return NETWORK.get(instance, _UNKNOWN_GBIT) * _GIGA / 8 / max(1, devices)
