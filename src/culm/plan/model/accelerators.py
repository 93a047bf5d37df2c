"""Performance figures of accelerators and network bandwidth of instances: vendors' figures, as of August 2026.

Prices change more often and are not in here: `culm.market` has them with their dates.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from culm.errors import PlanError

GIB = 2**30
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Accelerator:
    """An accelerator. Rates are peaks for dense matrices; `MATMUL_EFFICIENCY` is the share that training reaches."""

    name: str
    fp32: float
    """FLOP per second without tensor cores."""
    half_precision: float
    """FLOP per second of the tensor cores, in bf16; in fp16 where there is no bf16 (V100, T4)."""
    has_bf16: bool
    bandwidth: float
    """Bytes per second from and to its memory."""
    memory: int
    """Bytes."""
    nvlink: float = 0.0
    """Bytes per second from and to the other accelerators of an instance, both directions together; 0: no NVLink."""

    @property
    def default_precision(self) -> str:
        """bf16 where the accelerator has it, else fp32."""
        return "bf16" if self.has_bf16 else "fp32"

    def peak_flops(self, precision: str) -> float:
        return self.half_precision if precision == "bf16" else self.fp32


MATMUL_EFFICIENCY = {"fp32": 0.55, "bf16": 0.45}
"""Share of the peak that large matrix products reach in training."""
MEMORY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that all other work reaches."""
LAYER_LAUNCH_S = 60e-6
"""Minimum time of a layer, however small: about ten kernel launches."""
USABLE_MEMORY_SHARE = 0.92
"""Share of the memory that is left after context, fragmentation and library buffers."""


def _accelerator(
    name: str, fp32: float, half: float, bandwidth: float, gib: float, nvlink: float = 0.0, *, bf16: bool = True
) -> Accelerator:
    return Accelerator(name, fp32 * _TERA, half * _TERA, bf16, bandwidth * _GIGA, int(gib * GIB), nvlink * _GIGA)


ACCELERATORS = {
    device.name: device
    for device in (
        _accelerator("V100", 15.7, 125, 900, 16, 300, bf16=False),
        _accelerator("V100-32GB", 15.7, 125, 900, 32, 300, bf16=False),
        _accelerator("T4", 8.1, 65, 300, 16, bf16=False),
        _accelerator("L4", 30.3, 121, 300, 24),
        _accelerator("A10G", 31.5, 70, 600, 24),
        _accelerator("L40S", 91.6, 362, 864, 48),
        _accelerator("A100", 19.5, 312, 1555, 40, 600),
        _accelerator("A100-80GB", 19.5, 312, 2039, 80, 600),
        _accelerator("H100", 67.0, 989, 3350, 80, 900),
        _accelerator("H200", 67.0, 989, 4800, 141, 900),
        _accelerator("B200", 80.0, 2250, 8000, 180, 1800),
        # GB200 and B300: peak figures entered from memory of the vendor's data sheets, not verified against them.
        _accelerator("GB200", 80.0, 2500, 8000, 185, 1800),
        _accelerator("B300", 75.0, 2250, 8000, 262, 1800),
    )
}

INSTANCE_GBIT_PER_S = {
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
    "g6e.2xlarge": 20,
    "g6e.4xlarge": 20,
    "g6e.8xlarge": 25,
    "g6e.16xlarge": 35,
    "g6e.12xlarge": 100,
    "g6e.24xlarge": 200,
    "g6e.48xlarge": 400,
    "p4d.24xlarge": 400,
    "p4de.24xlarge": 400,
    "p5.4xlarge": 100,
    "p5.48xlarge": 3200,
    "p5e.48xlarge": 3200,
    "p5en.48xlarge": 3200,
    "p6-b200.48xlarge": 3200,
    "p6-b300.48xlarge": 6400,
    "p6e-gb200.36xlarge": 1600,
    "n1-standard-8+1xV100": 16,
    "n1-standard-8+1xT4": 16,
    "g2-standard-4+1xL4": 10,
    "a2-highgpu-1g+1xA100": 24,
    "a2-highgpu-8g+8xA100": 100,
    "a2-ultragpu-1g+1xA100-80GB": 24,
    "a2-ultragpu-8g+8xA100-80GB": 100,
    "a3-highgpu-1g+1xH100": 25,
    "a3-highgpu-8g+8xH100": 1000,
    "a3-megagpu-8g+8xH100": 1800,
    "a3-ultragpu-8g+8xH200": 3200,
    "a4-highgpu-8g+8xB200": 3600,
    "Standard_NC4as_T4_v3": 8,
    "Standard_NC6s_v3": 8,
    "Standard_ND40rs_v2": 100,
    "Standard_NC24ads_A100_v4": 20,
    "Standard_ND96asr_v4": 1600,
    "Standard_ND96amsr_A100_v4": 1600,
    "Standard_NC40ads_H100_v5": 40,
    "Standard_ND96isr_H100_v5": 3200,
    "Standard_ND96isr_H200_v5": 3200,
}
"""Network bandwidth of an instance in Gbit per second ("up to" where the vendor says so)."""

_DEFAULT_GBIT_PER_S = 10

PCIE_BYTES_PER_S = 12e9
"""Between accelerators of an instance without NVLink: PCIe 3.0 with 16 lanes, or 4.0 with 8, in one direction."""


def find_accelerator(name: str) -> Accelerator:
    """The accelerator called `name`. Raises PlanError with the nearest known name if there is none."""
    by_name = {known.lower(): device for known, device in ACCELERATORS.items()}
    if name.lower() not in by_name:
        close = difflib.get_close_matches(name.lower(), by_name, n=1)
        hint = f"did you mean {by_name[close[0]].name}?" if close else f"the known ones are {', '.join(ACCELERATORS)}"
        raise PlanError(f"there are no figures for the accelerator {name!r}: {hint}")
    return by_name[name.lower()]


def within_node_bandwidth(device: Accelerator) -> float:
    """Bytes per second, in one direction, from one accelerator of an instance to another."""
    return device.nvlink / 2 if device.nvlink else PCIE_BYTES_PER_S


def worker_bandwidth(instance: str, devices: int) -> float:
    """Bytes per second from one worker to other instances: its share of the instance's bandwidth."""
    return INSTANCE_GBIT_PER_S.get(instance, _DEFAULT_GBIT_PER_S) * _GIGA / 8 / max(1, devices)
