"""The address at which other machines reach this one, and its free ports."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.cluster.store.etcd import EtcdAccess

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def advertised_address(requested: str | None, access: EtcdAccess) -> str:
    """The IPv4 address to advertise: `requested`, an address or an interface; else the one that packets to etcd have.

    Raises UsageError if this machine has no such address or interface.
    """
    if requested is None:
        return _address_towards(access.endpoints[0])
    try:
        found = str(ipaddress.IPv4Address(requested))
    except ValueError:
        return _interface_address(requested)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((found, 0))
        except OSError:
            raise UsageError(f"--address {requested} is not an address of this machine: {_interface_list()}") from None
    return found


def default_address() -> str:
    """The address of this machine in its own network: the source address of packets to the outside. Loopback if the
    machine has no route. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # an address for documentation
        except OSError:
            return LOOPBACK
        found: str = sock.getsockname()[0]
        return found


def is_own_address(address: str) -> bool:
    """Whether `address` is an IPv4 address of this machine."""
    try:
        wanted = str(ipaddress.IPv4Address(address))
    except ValueError:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((wanted, 0))
        except OSError:
            return False
    return True


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            raise UsageError(
                f"--address {name!r} is neither an IPv4 address nor an interface that has one: {_interface_list()}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _interface_list() -> str:
    return f"the interfaces are {', '.join(name for _, name in socket.if_nameindex())}"


def _address_towards(endpoint: str) -> str:
    """The source address of packets to etcd. Nothing is sent."""
    parts = urlsplit(endpoint)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((parts.hostname or "", parts.port or 2379))
        except OSError as error:
            raise UsageError(f"--etcd {endpoint} cannot be reached over IPv4 ({error}): give --address") from None
        found: str = sock.getsockname()[0]
        return found


def check_free_ports(
    ports: tuple[int, int] | None, nodes: int, host: str = "127.0.0.1", *, workers_per_node: int = 1
) -> None:
    """Raise UsageError if a range has too few free ports: a node needs one for its agent and one for each worker."""
    if ports is None:
        return
    needed, free = (1 + workers_per_node) * nodes, 0
    for port in range(ports[0], ports[1] + 1):
        free += _is_free(host, port)
        if free == needed:
            return
    raise UsageError(
        f"--ports {ports[0]}-{ports[1]} has {free} free ports on {host}, and {nodes} nodes need {needed}: "
        "give a wider range, or another one"
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError:
            return False
    return True
