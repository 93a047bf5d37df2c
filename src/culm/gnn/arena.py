"""Tables in memory that workers on the same machine can map: what a task names they read in place, without a copy.

The memory has no name in a file system (memfd): it is gone with its last user, however that one ends. A worker finds it
through /proc; the secret at its beginning tells it apart from whatever has the same number on another machine.
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


class Layout(msgspec.Struct, frozen=True):
    """Where the tables are: by name (offset, type, shape)."""

    path: str
    secret: bytes
    size: int
    tables: dict[str, tuple[int, str, tuple[int, ...]]]


class Arena:
    """Tables of the process that makes them, filled with zeros."""

    def __init__(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        tables, at = {}, _ALIGN
        for name, (kind, shape) in shapes.items():
            tables[name] = (at, kind, shape)
            size = _DTYPES[kind].itemsize * int(torch.Size(shape).numel())
            at += -(-size // _ALIGN) * _ALIGN
        descriptor = os.memfd_create("culm-gnn")
        os.ftruncate(descriptor, at)
        self._memory = mmap.mmap(descriptor, at)
        secret = secrets.token_bytes(32)
        self._memory[:32] = secret
        self.layout = Layout(f"/proc/{os.getpid()}/fd/{descriptor}", secret, at, tables)
        self.tables = _views(self._memory, self.layout)


def mapped(layout: Layout) -> dict[str, Tensor] | None:
    """The tables of another process on this machine, to be read; None where they can not be reached."""
    try:
        descriptor = os.open(layout.path, os.O_RDWR)  # torch has no tensors that are read only
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != layout.size or os.pread(descriptor, 32, 0) != layout.secret:
            return None
        return _views(mmap.mmap(descriptor, layout.size), layout)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _views(memory: mmap.mmap, layout: Layout) -> dict[str, Tensor]:
    found = {}
    for name, (offset, kind, shape) in layout.tables.items():
        count = int(torch.Size(shape).numel())
        if count == 0:
            found[name] = torch.empty(shape, dtype=_DTYPES[kind])
        else:
            found[name] = torch.frombuffer(memory, dtype=_DTYPES[kind], count=count, offset=offset).view(shape)
    return found
