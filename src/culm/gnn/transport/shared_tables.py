"""Tables in shared memory: workers on the same machine map them and read the inputs of a task without a copy.

The memory has no name in a file system (memfd), so it is freed when its last process ends. A worker opens it through
/proc; the secret at its start distinguishes it from another machine's descriptor with the same path.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from torch import Tensor

_ALIGN = 64
_DTYPES = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}


class SharedTableLayout(msgspec.Struct, frozen=True):
    """Location of the tables: by name (offset, type, shape)."""

    path: str
    secret: bytes
    size: int
    tables: dict[str, tuple[int, str, tuple[int, ...]]]


class SharedTables:
    """Tables of the process that creates them, filled with zeros."""

    def __init__(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        tables, offset = {}, _ALIGN
        for name, (kind, shape) in shapes.items():
            tables[name] = (offset, kind, shape)
            size = _DTYPES[kind].itemsize * int(torch.Size(shape).numel())
            offset += -(-size // _ALIGN) * _ALIGN
        descriptor = os.memfd_create("culm-gnn")
        os.ftruncate(descriptor, offset)
        self._memory = mmap.mmap(descriptor, offset)
        secret = secrets.token_bytes(32)
        self._memory[:32] = secret
        self.layout = SharedTableLayout(f"/proc/{os.getpid()}/fd/{descriptor}", secret, offset, tables)
        self.tables = _table_views(self._memory, self.layout)


def map_tables(layout: SharedTableLayout) -> dict[str, Tensor] | None:
    """Map the tables of another process on this machine; the caller must only read them. Returns None if they cannot
    be reached."""
    try:
        descriptor = os.open(layout.path, os.O_RDWR)  # torch has no read-only tensors
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != layout.size or os.pread(descriptor, 32, 0) != layout.secret:
            return None
        return _table_views(mmap.mmap(descriptor, layout.size), layout)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _table_views(memory: mmap.mmap, layout: SharedTableLayout) -> dict[str, Tensor]:
    views = {}
    for name, (start, kind, shape) in layout.tables.items():
        count = int(torch.Size(shape).numel())
        if count == 0:
            views[name] = torch.empty(shape, dtype=_DTYPES[kind])
        else:
            views[name] = torch.frombuffer(memory, dtype=_DTYPES[kind], count=count, offset=start).view(shape)
    return views
