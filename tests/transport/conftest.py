from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .sides import MEMORY, SOCKETS, Side


@pytest.fixture(params=[MEMORY, SOCKETS], ids=lambda side: side.name)
def side(request: pytest.FixtureRequest) -> Side:
    found: Side = request.param
    return found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small: threads would only fight over the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
