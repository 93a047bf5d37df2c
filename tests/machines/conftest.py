"""Fixtures of the tests that launch runs."""

from __future__ import annotations

import shlex
import sys

import pytest


@pytest.fixture
def culm_program() -> str:
    """The command that runs culm on another machine."""
    return shlex.join([sys.executable, "-m", "culm"])
