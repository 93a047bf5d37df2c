"""Frames between two processes of this machine, side by side over sockets and through shared memory.

    python -m benchmarks.transport.shared_memory_cost [--rounds 20]

One frame at a time, there and back: the time of one way, with both checksums. `cpu` is the processor time of sending
one frame and receiving one, which is what a worker that computes meanwhile pays.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from statistics import median

import torch

from benchmarks.common.paired_rounds import compare_rounds, round_order
from benchmarks.transport.encryption_cost import EchoPair, echo_pair

SIZES = {"64 kB": 64 << 10, "256 kB": 256 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20}
_BYTES_PER_ROUND = 64 << 20
_MAX_FRAMES_PER_ROUND = 200


async def measure(rounds: int) -> None:
    """Print one line for each size."""
    async with echo_pair(min_shared_bytes=None) as sockets, echo_pair(min_shared_bytes=1) as shared:
        for name, size in SIZES.items():
            tensor = torch.randn(size // 4)
            count = min(max(1, _BYTES_PER_ROUND // size), _MAX_FRAMES_PER_ROUND)
            pairs: dict[bool, EchoPair] = {False: sockets, True: shared}
            seconds: dict[bool, list[float]] = {False: [], True: []}
            cpu: dict[bool, list[float]] = {False: [], True: []}
            for first in [True, *round_order(rounds)]:
                for is_shared in (not first, first):
                    began = time.process_time()
                    seconds[is_shared].append(await pairs[is_shared].exchange(tensor, count))
                    cpu[is_shared].append((time.process_time() - began) / count)
            found = compare_rounds(seconds[False][1:], seconds[True][1:])
            print(
                f"{name:>6}  sockets {1e3 * median(found.a_s):7.3f} ms (cpu {1e3 * median(cpu[False][1:]):7.3f})  "
                f"shared {1e3 * median(found.b_s):7.3f} ms (cpu {1e3 * median(cpu[True][1:]):7.3f})  "
                f"ratio {found.ratio_median:.2f} ({found.ci[0]:.2f} to {found.ci[1]:.2f}), {rounds} rounds",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    asyncio.run(measure(rounds))


if __name__ == "__main__":
    main()
