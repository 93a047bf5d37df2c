"""The result of one check of `culm doctor`."""

from __future__ import annotations

from typing import Literal, NamedTuple

CheckState = Literal["good", "weak", "broken"]


class CheckResult(NamedTuple):
    """The result of one check, and how to fix what it found."""

    name: str
    state: CheckState
    what: str
    fix: str = ""
