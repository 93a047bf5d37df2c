"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.program_fork_server import StartProgram

    from culm.providers.local_provider import ForkServerClient

# Heavy modules are imported in the fixtures that need them: the xdist controller reads this file, too.
gc.disable()  # until all tests are collected: imports leave no garbage

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:  # for shared test helpers and the benchmarks, which are not part of the installed package
    sys.path.insert(0, ROOT)

MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))  # checkpoints are synced, which is slow on a disk
os.environ.setdefault("CULM_HOME", f"{tempfile.gettempdir()}/culm-tests-{os.getuid()}")  # not the jobs of the user


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m real, skip the import of files without real tests."""
    if config.option.markexpr == "real" and collection_path.suffix == ".py":
        return "mark.real" not in collection_path.read_text() or None
    return None


def pytest_collection(session: pytest.Session) -> None:
    """Try properties on the same few examples in each run. EXAMPLES=1000 draws more, at random."""
    from hypothesis import settings

    at_random = "EXAMPLES" in os.environ
    examples = int(os.environ.get("EXAMPLES", "30"))
    settings.register_profile("culm", max_examples=examples, deadline=None, derandomize=not at_random)
    settings.load_profile("culm")
    if session.config.option.markexpr == "real":  # start it at once, so that it imports during the collection
        from tests import program_fork_server as programs

        with contextlib.ExitStack() as early:
            early.enter_context(programs.program_fork_server())
            session.config.add_cleanup(early.pop_all().close)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that wait the longest first, so that they wait while others compute."""
    items.sort(key=lambda item: -sum(mark.args[0] for mark in item.iter_markers("waits")))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def program_fork_server() -> Iterator[StartProgram]:
    """One process that programs are forked from, unless a test needs them started freshly."""
    from tests import program_fork_server as programs

    with programs.program_fork_server() as start:
        yield start


@pytest.fixture(scope="module")
def forked_programs(program_fork_server: StartProgram) -> Iterator[None]:
    """Programs of culm that the module's tests start are forked from a process that has imported all they need."""
    from tests import program_fork_server as programs

    with programs.forked_programs(program_fork_server):
        yield


@pytest.fixture
def fresh_programs() -> Iterator[None]:
    """Programs that a test starts are started freshly, even inside `forked_programs`."""
    from tests import program_fork_server as programs

    with programs.fresh_programs():
        yield


@pytest.fixture(scope="session")
def fork_server(program_fork_server: StartProgram) -> Iterator[ForkServerClient]:
    """One process with torch imported that real nodes are forked from; tests that use it are marked `real`."""
    from tests import program_fork_server as programs

    from culm.providers.local_provider import ForkServerClient

    with programs.forked_programs(program_fork_server):
        made = ForkServerClient()
    with made:
        yield made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: with small tensors more threads only compete for the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def memory_url() -> Iterator[str]:
    """A URL in memory that is empty before and after."""
    _clear_memory_filesystem()
    yield "memory://run"
    _clear_memory_filesystem()


def _clear_memory_filesystem() -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
