"""Fixtures that all tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.preloaded import Start

    from culm.providers.local import LocalNursery

# What is heavy is imported where it is needed: the process that hands tests out to others reads this file, too.
gc.disable()  # until all tests are found: imports leave no garbage

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:  # of what tests share, and of the benchmarks, which are no part of the installed package
    sys.path.insert(0, ROOT)

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # checkpoints are synced: a disk would be waited for


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file without real tests need not be imported to find that out."""
    if config.option.markexpr == "real" and collection_path.suffix == ".py":
        return "mark.real" not in collection_path.read_text() or None
    return None


def pytest_collection(session: pytest.Session) -> None:
    """Properties are tried on a few random examples, each time on others. To hunt: EXAMPLES=1000 pytest tests/plan."""
    from hypothesis import settings

    settings.register_profile("culm", max_examples=int(os.environ.get("EXAMPLES", "30")), deadline=None)
    settings.load_profile("culm")
    if session.config.option.markexpr == "real":  # it is needed at once: let it import while tests are found
        from tests import preloaded

        with contextlib.ExitStack() as early:
            early.enter_context(preloaded.zygote())
            session.config.add_cleanup(early.pop_all().close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever waits does so while others compute, and not when they are done: who waits longest begins."""
    items.sort(key=lambda item: -sum(mark.args[0] for mark in item.iter_markers("waits")))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it, again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Start]:
    """One process that all programs are forked from which need not be started anew."""
    from tests import preloaded

    with preloaded.zygote() as start:
        yield start


@pytest.fixture(scope="module")
def forked(zygote: Start) -> Iterator[None]:
    """Programs of culm that a module's tests start are forked out of a process which has imported all they need."""
    from tests import preloaded

    with preloaded.forking(zygote):
        yield


@pytest.fixture
def anew() -> Iterator[None]:
    """Programs that a test starts are started anew, whatever the rest of its module does."""
    from tests import preloaded

    with preloaded.anew():
        yield


@pytest.fixture(scope="session")
def nursery(zygote: Start) -> Iterator[LocalNursery]:
    """One process with torch imported that real nodes come out of; tests that use it are marked `real`."""
    from tests import preloaded

    from culm.providers.local import LocalNursery

    with preloaded.forking(zygote):
        made = LocalNursery()
    with made:
        yield made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Where tensors are small, threads would only fight over the cores."""
    import torch

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
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
