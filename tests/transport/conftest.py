from __future__ import annotations

import pytest

from .sides import MEMORY, SOCKETS, Side


@pytest.fixture(autouse=True)
def quiet(one_thread: None) -> None:
    """Tensors here are small: every test runs with one thread."""


@pytest.fixture(params=[MEMORY, SOCKETS], ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    found: Side = request.param
    return found
