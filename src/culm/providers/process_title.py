"""Readable names of culm's processes in `ps` and `top`. A title also hides the arguments of the process, which may
contain a join token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import setproctitle

_TOKEN_PREFIX = "culm1-"
_PASSWORD_OPTION = "--etcd-user"


def set_process_title(role: str, job: str = "", node: int | None = None) -> None:
    """Name this process, as in "culm agent gpt: node 3"."""
    named = f"culm {role} {job}".rstrip()
    setproctitle.setproctitle(named if node is None else f"{named}: node {node}")


def hide_secret_arguments(arguments: Sequence[str]) -> bool:
    """Replace the command line of this process by the name of the command if it contains a token or a password, which
    all users of the machine could read with `ps`. Returns whether it does."""
    secret = any(_TOKEN_PREFIX in argument for argument in arguments) or _has_password(arguments)
    if secret:
        set_process_title(next((argument for argument in arguments if not argument.startswith("-")), ""))
    return secret


def _has_password(arguments: Sequence[str]) -> bool:
    """Whether the user of etcd is given with a password."""
    values = [value for option, value in pairwise(arguments) if option == _PASSWORD_OPTION]
    values += [argument for argument in arguments if argument.startswith(f"{_PASSWORD_OPTION}=")]
    return any(":" in value for value in values)
