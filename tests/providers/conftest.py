"""Tensors here are small."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quiet(one_thread: None) -> None:
    """Every test runs with one thread."""
