"""Hook before each access to the storage of runs, in which simulated clusters raise the errors of injected faults."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

check_access: ContextVar[Callable[[str], None] | None] = ContextVar("check_access", default=None)
"""Called with the verb of the access, such as "write" or "read". What it raises is the error of the access. None in
real runs."""


def before_access(verb: str) -> None:
    """Call the hook of this context, if there is one."""
    check = check_access.get()
    if check is not None:
        check(verb)
