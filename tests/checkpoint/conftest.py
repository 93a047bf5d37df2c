from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from culm.checkpoint import CheckpointCatalog, Storage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> str:
    """A root that does not exist yet, on a disk and in an object store: the contract holds for both."""
    return f"{memory_url}/checkpoints" if request.param == "memory" else str(tmp_path / "run" / "checkpoints")


@pytest.fixture
def storage(root: str) -> Storage:
    return Storage(root)


@pytest.fixture
def catalog(storage: Storage) -> CheckpointCatalog:
    return CheckpointCatalog(storage)
