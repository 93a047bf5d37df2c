"""The environment of child processes. Imports the standard library only."""

from __future__ import annotations

import os

SECRET_VARIABLES = ("CULM_SECRET", "CULM_TOKEN", "CULM_ETCD_PASSWORD")
"""Read by the process that is given them. Others get what they need over a pipe."""


def environment_without_secrets() -> dict[str, str]:
    """The environment for a process that runs the user's code or another program, which may print it or pass it on."""
    return {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
