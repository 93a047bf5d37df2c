from __future__ import annotations

import pytest
from tests.transport.transport_variants import ENCRYPTED, LANES, MEMORY, SOCKETS, TransportVariant


@pytest.fixture(autouse=True)
def single_thread(one_thread: None) -> None:
    """Tensors here are small: every test runs with one thread."""


@pytest.fixture(params=[MEMORY, SOCKETS, ENCRYPTED, LANES], ids=lambda side: side.name)
def variant(request: pytest.FixtureRequest) -> TransportVariant:
    found: TransportVariant = request.param
    return found
