"""The schedule that `culm plan` and `culm simulate` assume: the one asked for, or that of a run without --schedule."""

from __future__ import annotations

import difflib
from dataclasses import fields

from culm.config import RunConfig
from culm.errors import UsageError
from culm.plan.rent.failure_free_step import AUTO, ESTIMATED_SCHEDULES


def default_schedule() -> str:
    """The schedule of `culm run` without --schedule."""
    return str(next(f.default for f in fields(RunConfig) if f.name == "schedule"))


def parse_schedule(name: str | None) -> str | None:
    """`--schedule`; None if it is not given. Raises UsageError for a schedule that cannot be estimated."""
    known = (*ESTIMATED_SCHEDULES, AUTO)
    if name is None or name in known:
        return name
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
    raise UsageError(f"--schedule is {name!r}, which cannot be estimated: {hint}")
