"""What encryption costs: frames and sums between two processes, side by side with and without it.

    python -m benchmarks.transport.encryption_cost [--rounds 20]

Both processes are on this machine and share its cores, so that encrypting and decrypting add up and nothing hides
behind the time of a network: an upper bound. Both pairs send over sockets, as between machines: plain frames within one
machine would otherwise travel through shared memory. The table of ciphers has the time of AES-256-GCM next to the time
of its tag alone (authentication without encryption) and of HMAC-SHA256.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from statistics import median
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from benchmarks.common.paired_rounds import compare_rounds, round_order
from culm.transport.frames.encryption_policy import EncryptionPolicy
from culm.transport.frames.sockets import SocketTransport
from culm.transport.interface import FrameKey, Group

SIZES = {"4 kB": 4 << 10, "256 kB": 256 << 10, "4 MB": 4 << 20}
_SECRET = b"a secret of this benchmark"
_BYTES_PER_ROUND = 16 << 20
_MAX_FRAMES_PER_ROUND = 200


class EchoPair:
    """An endpoint here, and one in a forked process that returns every frame and takes part in every sum."""

    def __init__(self, transport: SocketTransport, peer: str, group: Group) -> None:
        self._transport, self._peer, self._group = transport, peer, group
        self._number = 0

    async def exchange(self, tensor: torch.Tensor, count: int) -> float:
        """Send frames there and back, one at a time. Returns the seconds for one way of one frame."""
        began = time.perf_counter()
        for _ in range(count):
            self._number += 1
            self._transport.send(self._peer, FrameKey(1, self._number, "there"), [tensor])
            await self._transport.receive(FrameKey(1, self._number, "back"))
        return (time.perf_counter() - began) / count / 2

    async def reduce(self, tensor: torch.Tensor, count: int) -> float:
        """Sum tensors over both processes, one at a time. Returns the seconds of one sum."""
        began = time.perf_counter()
        for _ in range(count):
            self._number += 1
            self._transport.send(self._peer, FrameKey(1, self._number, "there"), [torch.tensor(tensor.numel()), None])
            await self._group.all_reduce(tensor.clone())
        return (time.perf_counter() - began) / count


@asynccontextmanager
async def echo_pair(policy: EncryptionPolicy = "auto", **options: Any) -> AsyncIterator[EchoPair]:
    """A pair, connected. `options`: of both endpoints."""
    ours, theirs = socket.socketpair()
    with _forked(lambda: asyncio.run(_echo(theirs, policy, options))), ours, theirs:
        transport = SocketTransport(secret=_SECRET, encryption=policy, **options)
        ours.send(transport.address.encode())
        peer = (await asyncio.to_thread(ours.recv, 100)).decode()
        group = transport.group(FrameKey(1, 0, "group"), [transport.address, peer])
        await group.join()
        yield EchoPair(transport, peer, group)
        group.close()
        await transport.close()


async def _echo(control: socket.socket, policy: EncryptionPolicy, options: Mapping[str, Any]) -> None:
    transport = SocketTransport(secret=_SECRET, encryption=policy, **options)
    peer = control.recv(100).decode()
    control.send(transport.address.encode())
    group = transport.group(FrameKey(1, 0, "group"), [peer, transport.address])
    await group.join()
    number = 0
    while True:
        number += 1
        frame = await transport.receive(FrameKey(1, number, "there"))
        if len(frame) == 1:
            transport.send(peer, FrameKey(1, number, "back"), frame)
        else:
            assert frame[0] is not None
            await group.all_reduce(torch.ones(int(frame[0])))


@contextmanager
def _forked(work: Callable[[], None]) -> Iterator[None]:
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(1)
    try:
        yield
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)


async def measure(rounds: int) -> None:
    """Print one line for each size and kind."""
    async with echo_pair("off", min_shared_bytes=None) as plain, echo_pair("on") as encrypted:
        for kind in ("frame", "sum"):
            for name, size in SIZES.items():
                tensor = torch.randn(size // 4)
                count = min(max(1, _BYTES_PER_ROUND // size), _MAX_FRAMES_PER_ROUND)
                seconds: dict[bool, list[float]] = {False: [], True: []}
                for first in [True, *round_order(rounds)]:
                    for is_encrypted in (not first, first):
                        pair = encrypted if is_encrypted else plain
                        work = pair.exchange if kind == "frame" else pair.reduce
                        seconds[is_encrypted].append(await work(tensor, count))
                found = compare_rounds(seconds[False][1:], seconds[True][1:])
                added = median(b - a for a, b in zip(found.a_s, found.b_s, strict=True))
                print(
                    f"{kind:5} {name:>6}  plain {1e6 * median(found.a_s):8.0f} us  encrypted "
                    f"{1e6 * median(found.b_s):8.0f} us  added {1e6 * added:7.0f} us  ratio {found.ratio_median:.2f} "
                    f"({found.ci[0]:.2f} to {found.ci[1]:.2f}), {rounds} rounds",
                    flush=True,
                )


def measure_ciphers(rounds: int) -> None:
    """Print the time of each cipher for each size."""
    cipher, nonce, key = AESGCM(os.urandom(32)), bytes(12), os.urandom(32)
    for name, size in SIZES.items():
        data = os.urandom(size)
        works: dict[str, Callable[[], object]] = {
            "AES-256-GCM": lambda data=data: cipher.encrypt(nonce, data, None),  # type: ignore[misc]
            "its tag alone": lambda data=data: cipher.encrypt(nonce, b"", data),  # type: ignore[misc]
            "HMAC-SHA256": lambda data=data: hmac.digest(key, data, "sha256"),  # type: ignore[misc]
        }
        found = {label: median(_seconds(work) for _ in range(5 * rounds)) for label, work in works.items()}
        print(f"{name:>12}  " + "  ".join(f"{label} {1e6 * value:.1f} us" for label, value in found.items()))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    asyncio.run(measure(rounds))
    measure_ciphers(rounds)


if __name__ == "__main__":
    main()
