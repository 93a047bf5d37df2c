"""Launchers of elastic workers, by name.

launcher              the Launcher protocol, and the ticket of a worker
worker_entry          the function that a started process runs
local_launcher        processes on this machine (default), forked by `elastic_fork_server`
ray_launcher          tasks of a Ray cluster
lambda_launcher       invocations of an AWS Lambda function
lambda_package        the zip of that function
lambda_handler        the handler that runs in it
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from culm.errors import UsageError
from culm.gnn.launch.launcher import Launcher, Ticket

__all__ = ["LAUNCHERS", "Launcher", "Ticket", "make_launcher"]


def make_launcher(spec: str = "local", **options: Any) -> Launcher:
    """Return the launcher for `local`, `ray:address=auto,cpus=0.5` or `lambda:role=arn:...,memory_mb=3008`.

    Options of the launcher follow the colon; a list is written with +, as in `subnets=a+b`. Raises UsageError for an
    unknown name or option, and if the launcher's package is not installed.
    """
    name, _, rest = spec.partition(":")
    if name not in LAUNCHERS:
        raise UsageError(f"there is no launcher {name!r}: {_hint(name, LAUNCHERS)}")
    make, fields = LAUNCHERS[name]()
    return make(**_parse_options(name, rest, fields), **options)


def _import_local() -> tuple[Callable[..., Launcher], dict[str, Any]]:
    from culm.gnn.launch.local_launcher import LocalLauncher

    return LocalLauncher, {}


def _import_ray() -> tuple[Callable[..., Launcher], dict[str, Any]]:
    from culm.gnn.launch.ray_launcher import RayLauncher

    return RayLauncher, {"address": str, "cpus": float}


def _import_lambda() -> tuple[Callable[..., Launcher], dict[str, Any]]:
    from culm.gnn.launch.lambda_launcher import LambdaFunction, LambdaLauncher

    return LambdaLauncher, {
        name: _option_parser(p.annotation) for name, p in inspect.signature(LambdaFunction).parameters.items()
    }


LAUNCHERS = {"local": _import_local, "ray": _import_ray, "lambda": _import_lambda}
"""By name: a function that imports the launcher and returns its class and the parsers of its options."""


def _option_parser(annotation: str) -> Callable[[str], Any]:
    if annotation.startswith("tuple"):
        return lambda text: tuple(text.split("+"))
    return int if annotation.startswith("int") else str


def _parse_options(name: str, text: str, fields: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in fields:
            raise UsageError(f"launcher {name} has no option {key!r}: {_hint(key, fields)}")
        try:
            options[key] = fields[key](value)
        except ValueError:
            raise UsageError(f"launcher {name} has {key}={value}: give a number") from None
    return options


def _hint(word: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"use {', '.join(known)}" if known else "there are none"
