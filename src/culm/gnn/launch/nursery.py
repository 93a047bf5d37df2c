"""The process that local workers are forked from: it has imported what they need, computes nothing, has no threads.

    launcher ──pipe── nursery ──fork── worker
                              ──fork── worker ...

Everything below the launcher is one process group. When the pipe closes, for whatever reason, the nursery ends the
group and itself. Each of the processes holds the write end of a second pipe, so its reader knows when all are gone.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec

from culm.gnn.launch.base import Ticket
from culm.gnn.launch.entry import Entry, live, resolve
from culm.providers.nursery import NVML_CHECK, fork, preloading

_REAP_S = 0.2


class Order(msgspec.Struct, frozen=True):
    """Start `count` workers with that entry; without a ticket only tell who lives."""

    number: int
    entry: str
    ticket: Ticket | None = None
    count: int = 0


class Living(msgspec.Struct, frozen=True):
    """The answer to the order of that number: process ids of such workers that live, the new ones last."""

    number: int
    pids: tuple[int, ...]


encode = msgspec.msgpack.Encoder().encode
orders = msgspec.msgpack.Decoder(Order)
answers = msgspec.msgpack.Decoder(Living)


class Nursery:
    """The nursery's own side of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._workers: dict[int, str] = {}
        """The entry of each by its process id, oldest first."""

    def serve(self) -> None:
        """Obey until the launcher is gone."""
        while True:
            self._reap()
            try:
                if self._pipe.poll(_REAP_S):
                    self._obey(orders.decode(self._pipe.recv_bytes()))
            except (EOFError, OSError):
                return

    def _obey(self, order: Order) -> None:
        if order.ticket is not None:
            for _ in range(order.count):
                self._workers[self._fork(resolve(order.entry), order.ticket)] = order.entry
        self._reap()
        living = tuple(pid for pid, entry in self._workers.items() if entry == order.entry)
        self._pipe.send_bytes(encode(Living(order.number, living)))

    def _fork(self, entry: Entry, ticket: Ticket) -> int:
        def child() -> None:
            self._pipe.close()
            live(entry, ticket)

        return fork(child)

    def _reap(self) -> None:
        while self._workers:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._workers.pop(pid, None)


def main(descriptor: int, *entries: str) -> None:
    """The nursery process, with what these entries need imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    os.environ[NVML_CHECK] = "1"  # looking for a GPU must not start one here
    with preloading():
        for entry in entries:
            resolve(entry)  # imports it
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # workers share the cores among themselves
    try:
        Nursery(Connection(descriptor)).serve()
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # Run as a module this file is __main__; the messages must be those of the importable module.
    importlib.import_module("culm.gnn.launch.nursery").main(int(sys.argv[1]), *sys.argv[2:])
