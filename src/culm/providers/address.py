"""Which address of this machine others reach it at."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from culm.errors import UsageError

if TYPE_CHECKING:
    from culm.cluster.etcd import Access

_SIOCGIFADDR = 0x8915


def own_address(asked: str | None, access: Access) -> str:
    """The IPv4 address to advertise: as asked, by number or by interface; else the one that etcd sees.

    UsageError: there is no such address or interface here.
    """
    if asked is None:
        return _towards(access.endpoints[0])
    try:
        found = str(ipaddress.IPv4Address(asked))
    except ValueError:
        return _of_interface(asked)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((found, 0))
        except OSError:
            raise UsageError(f"--address {asked} is no address of this machine: {_choices()}") from None
    return found


def _of_interface(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            raise UsageError(
                f"--address {name!r} is neither an IPv4 address nor an interface that has one: {_choices()}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _choices() -> str:
    return f"the interfaces are {', '.join(name for _, name in socket.if_nameindex())}"


def _towards(endpoint: str) -> str:
    """The address that packets to etcd leave from; nothing is sent."""
    parts = urlsplit(endpoint)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((parts.hostname or "", parts.port or 2379))
        except OSError as error:
            raise UsageError(f"--etcd {endpoint} can not be reached over IPv4 ({error}): give --address") from None
        found: str = sock.getsockname()[0]
        return found
