"""Tests with small tensors: several threads would only compete for the cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _use_one_thread(one_thread: None) -> None:
    """Applies to every test of this folder."""
