"""Fixtures that all tests share."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from culm.providers.local import LocalNursery

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it, again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def nursery() -> Iterator[LocalNursery]:
    """One process with torch imported that real nodes come out of; tests that use it are marked `real`."""
    with LocalNursery() as found:
        yield found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Where tensors are small, threads would only fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory() -> Iterator[str]:
    """A place in memory that is empty before and after."""
    _forget_memory()
    yield "memory://run"
    _forget_memory()


def _forget_memory() -> None:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
