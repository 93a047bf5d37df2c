"""How other machines are reached: the system's ssh, without questions, and with a limit for connections that hang."""

from __future__ import annotations

import re
import shlex

from culm.errors import UsageError

SSH_FAILED = 255
"""Exit status of ssh when there is no connection."""
_OPTIONS = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
_ADDRESS = re.compile(r"[A-Za-z0-9_.@:%-]+")


def ssh_command(given: str | None, option: str) -> list[str]:
    """The ssh command and its options; those of the user come first, which wins. Raises UsageError."""
    try:
        words = shlex.split(given or "")
    except ValueError as error:
        raise UsageError(f"{option} is {given!r}: {error}") from None
    return [*(words or ["ssh"]), *shlex.split(_OPTIONS)]


def check_address(address: str, option: str) -> str:
    """An address as ssh understands it. Raises UsageError for one that ssh could take for an option or a command."""
    if address.startswith("-") or not _ADDRESS.fullmatch(address):
        raise UsageError(f"{option} names {address!r}, which is not a host: use [USER@]HOST")
    return address
