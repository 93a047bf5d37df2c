"""Connections without the token to every port that the Python processes of a run listen on."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_SCAN_S = 0.01
_WAIT_S = 120.0
"""Longer than the ports of a run take to appear: only a test that would hang waits for so long."""
_AT_ONCE = 100
"""Connections to one port before the next port has its turn."""
_LISTENING = "0A"


class SilentConnections:
    """Dials every listening port of this process and of its descendants as soon as it appears. Each connection sends
    `first_bytes` and then nothing."""

    def __init__(self, per_port: int, first_bytes: bytes = b"") -> None:
        self._per_port, self._first_bytes = per_port, first_bytes
        self._before = set(_listening_ports())
        self._connections: dict[int, list[socket.socket]] = {}
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run)

    def wait_for_ports(self, ports: int) -> None:
        """Wait until this many ports have at least as many connections as one turn makes. Raises AssertionError if
        they do not get them."""
        needed = min(self._per_port, _AT_ONCE)

        def are_connected() -> bool:
            return sum(len(connections) >= needed for connections in self._connections.values()) >= ports

        with self._changed:
            if not self._changed.wait_for(are_connected, timeout=_WAIT_S):
                counts = {port: len(connections) for port, connections in self._connections.items()}
                raise AssertionError(f"fewer than {ports} ports have {needed} connections: {counts}")

    def _run(self) -> None:
        while not self._stopped.wait(_SCAN_S):
            for port in set(_listening_ports()) - self._before:
                self._dial(port)

    def _dial(self, port: int) -> None:
        with self._changed:
            connections = self._connections.setdefault(port, [])
        with contextlib.suppress(OSError):  # the port was closed meanwhile
            for _ in range(min(_AT_ONCE, self._per_port - len(connections))):
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                with self._changed:
                    connections.append(connection)
                    self._changed.notify_all()
                connection.sendall(self._first_bytes)

    def __enter__(self) -> SilentConnections:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for connection in (c for connections in self._connections.values() for c in connections):
            connection.close()


@contextlib.contextmanager
def open_files_allowed(count: int) -> Iterator[None]:
    """Raise the limit of open files; skip the test if the system does not allow that many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{count} open files are needed and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _listening_ports() -> list[int]:
    inodes = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTENING:
            inodes[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    return [inodes[link] for pid in _python_processes() for link in _descriptor_targets(pid) if link in inodes]


def _python_processes() -> list[int]:
    """This process and its descendants, without etcd."""
    children: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
                children.setdefault(int(rest.split()[1]), []).append(int(folder.name))
                names[int(folder.name)] = name
    found = [os.getpid()]
    for pid in found:
        found += children.get(pid, [])
    return [pid for pid in found if names.get(pid) != "etcd"]


def _descriptor_targets(pid: int) -> list[str]:
    targets = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(str(entry.readlink()))
    return targets
