"""Which connections are encrypted. Both ends decide by the same rule and refuse a connection on which they differ."""

from __future__ import annotations

import ipaddress
import socket
from typing import Literal, TypeAlias, get_args

EncryptionPolicy: TypeAlias = Literal["auto", "on", "off"]
"""auto: every connection except those within one machine over loopback; on: every connection; off: none."""
ENCRYPTION_POLICIES: tuple[EncryptionPolicy, ...] = get_args(EncryptionPolicy)


def is_loopback(host: str) -> bool:
    """Whether a host is reached without leaving this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("", "localhost")


def encrypts_host(policy: EncryptionPolicy, host: str) -> bool:
    """Whether a connection to a host is encrypted."""
    return policy == "on" or (policy == "auto" and not is_loopback(host))


def encrypts_socket(policy: EncryptionPolicy, sock: socket.socket) -> bool:
    """Whether a connected socket is encrypted. Decided by the address at its other end, which the kernel knows, and not
    by what the other end claims. Sockets without an address are within this machine."""
    peer = sock.getpeername() if sock.family in (socket.AF_INET, socket.AF_INET6) else ("",)
    return encrypts_host(policy, str(peer[0]))
