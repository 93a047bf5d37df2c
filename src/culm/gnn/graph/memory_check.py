"""Memory check before a large allocation, so that the process is not killed by the kernel."""

from __future__ import annotations

import os
from pathlib import Path

from culm.errors import UsageError

_USABLE_SHARE = 0.9
"""Share of the available memory that may be used."""


def available_memory_bytes() -> int:
    """Return the bytes that can be allocated now without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_fits_in_memory(
    needed: float, what: str, fix: str = "use a smaller graph, or a machine with more memory"
) -> None:
    """Raise UsageError if `needed` bytes are not available."""
    usable = available_memory_bytes() * _USABLE_SHARE
    if needed > usable:
        raise UsageError(f"{what} needs {needed / 2**30:.1f} GiB and {usable / 2**30:.1f} GiB are free: {fix}")
