"""Large frames between two processes over one connection and over several, side by side.

    python -m benchmarks.transport.lane_cost [--rounds 20] [--lanes 4] [--encrypt on]

Frames go there and back, one at a time: the time of one way, with both checksums, and the throughput that follows from
it. `cpu` is the processor time of this process for sending one frame and receiving one. Shared memory is not used, as
between machines. Over loopback the kernel copies each byte twice, on the cores that the two processes use: what several
connections gain depends on the number of cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from statistics import median

import torch

from benchmarks.common.paired_rounds import compare_rounds, round_order
from benchmarks.transport.encryption_cost import EchoPair, echo_pair
from culm.transport.frames.lanes import LANES

SIZES = {"8 MiB": 8 << 20, "32 MiB": 32 << 20, "128 MiB": 128 << 20}
_BYTES_PER_ROUND = 256 << 20


async def measure(rounds: int, lanes: int, policy: str) -> None:
    """Print one line for each size."""
    options = {"min_shared_bytes": None}
    async with (
        echo_pair(policy, lanes=0, **options) as single,  # type: ignore[arg-type]
        echo_pair(policy, lanes=lanes, **options) as several,  # type: ignore[arg-type]
    ):
        for name, size in SIZES.items():
            tensor = torch.randn(size // 4)
            count = max(1, _BYTES_PER_ROUND // size)
            pairs: dict[bool, EchoPair] = {False: single, True: several}
            seconds: dict[bool, list[float]] = {False: [], True: []}
            cpu: dict[bool, list[float]] = {False: [], True: []}
            for first in [True, *round_order(rounds)]:
                for has_lanes in (not first, first):
                    began = time.process_time()
                    seconds[has_lanes].append(await pairs[has_lanes].exchange(tensor, count))
                    cpu[has_lanes].append((time.process_time() - began) / count)
            found = compare_rounds(seconds[False][1:], seconds[True][1:])
            one, more = median(found.a_s), median(found.b_s)
            print(
                f"{name:>8}  one {1e3 * one:7.2f} ms, {size / one / 1e9:5.2f} GB/s"
                f" (cpu {1e3 * median(cpu[False][1:]):7.2f})"
                f"  {lanes} lanes {1e3 * more:7.2f} ms, {size / more / 1e9:5.2f} GB/s"
                f" (cpu {1e3 * median(cpu[True][1:]):7.2f})"
                f"  ratio {found.ratio_median:.2f} ({found.ci[0]:.2f} to {found.ci[1]:.2f}), {rounds} rounds",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--lanes", type=int, default=LANES)
    parser.add_argument("--encrypt", choices=["auto", "on"], default="auto")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}")
    asyncio.run(measure(given.rounds, given.lanes, given.encrypt))


if __name__ == "__main__":
    main()
