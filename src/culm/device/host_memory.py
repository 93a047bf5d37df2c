"""How much memory this process may use: that of the machine, or less if a control group (a container) limits it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def machine_memory_bytes() -> int:
    """The memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_memory_bytes() -> int:
    """The memory that this process may use. Page-locked and shared memory count, too."""
    return min([machine_memory_bytes(), *_group_limits()])


def _group_limits() -> list[int]:
    """The limits of the control groups of this process, of both versions."""
    limits = []
    for path in _limit_files():
        with suppress(OSError, ValueError):  # "max", or no file there
            limits.append(int(path.read_text()))
    return limits


def _limit_files() -> list[Path]:
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        folder, name = _CONTROL_GROUPS, "memory.max"
        if controllers:
            if "memory" not in controllers.split(","):
                continue
            folder, name = _CONTROL_GROUPS / "memory", "memory.limit_in_bytes"
        own = PurePosixPath(group.lstrip("/"))
        files += [folder / each / name for each in (own, *own.parents)]
    return files
