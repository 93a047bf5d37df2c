"""Fixtures that all tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from culm.providers.local import LocalNursery

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def nursery() -> Iterator[LocalNursery]:
    """One process with torch imported that real nodes come out of; tests that use it are marked `real`."""
    with LocalNursery() as found:
        yield found
