"""Where elastic workers come from: a launcher by name.

base       the ticket of a worker, and what a launcher promises
entry      what a started process runs
local      processes of this machine (default), forked out of the process in `nursery`
ray        tasks of a Ray cluster
awslambda  invocations of an AWS Lambda function: `package` makes its zip, `handler` is what runs there
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from culm.errors import UsageError
from culm.gnn.launch.base import Launcher, Ticket

__all__ = ["LAUNCHERS", "Launcher", "Ticket", "launcher"]


def launcher(spec: str = "local", **options: Any) -> Launcher:
    """The launcher of that name, as in `local`, `ray:address=auto,cpus=0.5` or `lambda:role=arn:...,memory_mb=3008`.

    What stands behind the colon are options of the launcher; a list is written with +, as in `subnets=a+b`. Raises
    UsageError for an unknown name or option, and where the package behind a launcher is not installed.
    """
    name, _, rest = spec.partition(":")
    if name not in LAUNCHERS:
        raise UsageError(f"there is no launcher {name!r}: {_hint(name, LAUNCHERS)}")
    make, fields = LAUNCHERS[name]()
    return make(**_read(name, rest, fields), **options)


def _local() -> tuple[Callable[..., Launcher], dict[str, Any]]:
    from culm.gnn.launch.local import LocalLauncher

    return LocalLauncher, {}


def _ray() -> tuple[Callable[..., Launcher], dict[str, Any]]:
    from culm.gnn.launch.ray import RayLauncher

    return RayLauncher, {"address": str, "cpus": float}


def _lambda() -> tuple[Callable[..., Launcher], dict[str, Any]]:
    from culm.gnn.launch.awslambda import Function, LambdaLauncher

    return LambdaLauncher, {name: _kind(p.annotation) for name, p in inspect.signature(Function).parameters.items()}


LAUNCHERS = {"local": _local, "ray": _ray, "lambda": _lambda}
"""By name: what imports it, and gives its class and the options that can be written behind its name."""


def _kind(annotation: str) -> Callable[[str], Any]:
    if annotation.startswith("tuple"):
        return lambda text: tuple(text.split("+"))
    return int if annotation.startswith("int") else str


def _read(name: str, text: str, fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in fields:
            raise UsageError(f"launcher {name} has no option {key!r}: {_hint(key, fields)}")
        try:
            found[key] = fields[key](value)
        except ValueError:
            raise UsageError(f"launcher {name} has {key}={value}: give a number") from None
    return found


def _hint(word: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there is {', '.join(known) or 'none'}"
