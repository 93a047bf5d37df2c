"""Whether something fits into this machine's memory: asked before it is tried, so that nobody is killed for it."""

from __future__ import annotations

import os
from pathlib import Path

from culm.errors import UsageError

_SHARE = 0.9
"""Of what is available: the rest is for everyone else."""


def available() -> int:
    """Bytes that can be had now, swapping nothing out."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_what_does_not_fit(
    needed: float, what: str, fix: str = "take a smaller graph, or a machine with more memory"
) -> None:
    """Raise UsageError if that many bytes are not there."""
    there = available() * _SHARE
    if needed > there:
        raise UsageError(f"{what} needs {needed / 2**30:.1f} GiB and {there / 2**30:.1f} GiB are free: {fix}")
