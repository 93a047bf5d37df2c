from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: threads would only fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory() -> Iterator[str]:
    """A place in memory that is empty before and after."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://run"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
