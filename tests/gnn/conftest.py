"""Tensors here are small: threads would only fight over the cores."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _calm(one_thread: None) -> None:
    """Every test of this folder."""
