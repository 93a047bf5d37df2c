"""The fork server of local workers: has imported everything they need, computes nothing, and has no threads.

    launcher ──pipe── fork server ──fork── worker
                                  ──fork── worker ...

The fork server and all workers are one process group. When the pipe closes, for whatever reason, the fork server kills
the group and itself. Every process holds the write end of a second pipe, so its reader knows when all have ended.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from multiprocessing.connection import Connection

import msgspec

from culm.gnn.launch.launcher import Ticket
from culm.gnn.launch.worker_entry import Entry, resolve_entry, run_with_time_limit
from culm.providers.fork_server import NVML_CHECK_VARIABLE, fork, gc_frozen_imports

_REAP_S = 0.2


class ForkRequest(msgspec.Struct, frozen=True):
    """Request to start `count` workers with that entry; without a ticket, only to list the living ones."""

    number: int
    entry: str
    ticket: Ticket | None = None
    count: int = 0


class LiveWorkers(msgspec.Struct, frozen=True):
    """Response to the request of that number: process ids of living workers with its entry, the newest last."""

    number: int
    pids: tuple[int, ...]


encode_frame = msgspec.msgpack.Encoder().encode
request_decoder = msgspec.msgpack.Decoder(ForkRequest)
response_decoder = msgspec.msgpack.Decoder(LiveWorkers)


class ElasticForkServer:
    """The fork server's side of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._workers: dict[int, str] = {}
        """Entry of each worker by process id, oldest first."""

    def serve(self) -> None:
        """Handle requests until the launcher is gone."""
        while True:
            self._reap()
            try:
                if self._pipe.poll(_REAP_S):
                    self._handle_request(request_decoder.decode(self._pipe.recv_bytes()))
            except (EOFError, OSError):
                return

    def _handle_request(self, request: ForkRequest) -> None:
        if request.ticket is not None:
            for _ in range(request.count):
                self._workers[self._fork(resolve_entry(request.entry), request.ticket)] = request.entry
        self._reap()
        living = tuple(pid for pid, entry in self._workers.items() if entry == request.entry)
        self._pipe.send_bytes(encode_frame(LiveWorkers(request.number, living)))

    def _fork(self, entry: Entry, ticket: Ticket) -> int:
        def child() -> None:
            self._pipe.close()
            run_with_time_limit(entry, ticket)

        return fork(child)

    def _reap(self) -> None:
        while self._workers:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self._workers.pop(pid, None)


def main(descriptor: int, *entries: str) -> None:
    """Run the fork server process with the modules of these entries imported."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the launcher
    os.environ[NVML_CHECK_VARIABLE] = "1"  # the check for a GPU must not initialize CUDA here
    with gc_frozen_imports():
        for entry in entries:
            resolve_entry(entry)  # imports the module
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # workers share the cores
    try:
        ElasticForkServer(Connection(descriptor)).serve()
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # As a module of its own this file is __main__, but messages must have the types of the importable module.
    importlib.import_module("culm.gnn.launch.elastic_fork_server").main(int(sys.argv[1]), *sys.argv[2:])
