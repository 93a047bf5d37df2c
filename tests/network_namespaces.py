"""Hosts with their own addresses on one machine: network namespaces around a switch that can lose packets.

    switch (namespace with a bridge) ── host a 10.77.0.1
                                     ── host b 10.77.0.2 ...

The machine's own network is not touched. Needs root and iproute2; tests that use it skip elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_PREFIX = f"culm-{os.getpid()}"


class NoLab(Exception):
    """This machine does not support network namespaces."""


class Lab:
    """Hosts by name. Use `lab`."""

    def __init__(self, hosts: list[str]) -> None:
        self._number = {host: i for i, host in enumerate(hosts)}

    def address(self, host: str) -> str:
        return f"10.77.0.{self._number[host] + 1}"

    def command(self, host: str, *command: str) -> list[str]:
        """The command that runs `command` on a host, without an extra process."""
        return ["ip", "netns", "exec", _space(host), *command]

    def silence(self, host: str) -> None:
        """Drop all packets to and from a host without an error, as for a vanished machine or a partition."""
        _ip("bridge", "-n", _space("switch"), "link", "set", "dev", self._port(host), "state", "0")

    def heal(self, host: str) -> None:
        _ip("bridge", "-n", _space("switch"), "link", "set", "dev", self._port(host), "state", "3")

    def unplug(self, host: str) -> None:
        """Take the host's link down, which the host can see."""
        _ip("ip", "-n", _space("switch"), "link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        _ip("ip", "-n", _space("switch"), "link", "set", self._port(host), "up")

    def slow(self, host: str, ms: int) -> None:
        """Delay packets to a host or, if the kernel has no netem, let them wait before a narrow link: 1 Mbit/s for 100
        ms. Raises NoLab if it has neither."""
        where = ["tc", "-n", _space("switch"), "qdisc", "replace", "dev", self._port(host), "root"]
        try:
            _ip(*where, "netem", "delay", f"{ms}ms")
        except NoLab:
            _ip(*where, "tbf", "rate", f"{100_000 // ms}kbit", "burst", "1600", "latency", "5s")

    def _port(self, host: str) -> str:
        return f"port{self._number[host]}"

    def _build(self) -> None:
        _ip("ip", "netns", "add", _space("switch"))
        _ip("ip", "-n", _space("switch"), "link", "add", "bridge0", "type", "bridge")
        _ip("ip", "-n", _space("switch"), "link", "set", "bridge0", "up")
        for host in self._number:
            self._join(host)

    def _join(self, host: str) -> None:
        switch, space, port = _space("switch"), _space(host), self._port(host)
        _ip("ip", "netns", "add", space)
        _ip("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
        _ip("ip", "-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("ip", "-n", space, "link", "set", device, "up")

    def _tear_down(self) -> None:
        for name in ("switch", *self._number):
            with contextlib.suppress(NoLab):
                _ip("ip", "netns", "delete", _space(name))


@contextmanager
def lab(*hosts: str) -> Iterator[Lab]:
    """Hosts around a switch, removed afterwards. Raises NoLab if the machine does not support it."""
    made = Lab(list(hosts))
    try:
        made._build()
        yield made
    finally:
        made._tear_down()


@cache
def possible() -> bool:
    """Whether this machine supports it."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("ip", "bridge", "tc")):
        return False
    try:
        with lab("probe"):
            return True
    except NoLab:
        return False


def _space(name: str) -> str:
    return f"{_PREFIX}-{name}"


def _ip(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoLab(f"{' '.join(command)}: {done.stderr.strip()}")
