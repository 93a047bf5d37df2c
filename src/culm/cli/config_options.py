"""Options of commands that are fields of RunConfig: names, types, defaults and help texts come from RunConfig."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_origin, get_type_hints

import typer

from culm import config as config_module
from culm.cli.error_reporting import print_error
from culm.cli.option_values import parse_cuts, parse_duration, parse_ports, parse_size, parse_usd
from culm.config import RunConfig, merge_options, option_name
from culm.errors import UsageError

F = TypeVar("F", bound=Callable[..., None])

_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "memory": parse_size,
    "ports": parse_ports,
    "cuts": parse_cuts,
    "deadline": parse_duration,
    "budget": parse_usd,
}
"""Fields whose option is a text in a notation of its own."""
_METAVARS = {
    "out": "DIR|URL",
    "resume": "DIR|URL",
    "profile": "FILE",
    "trace": "FILE",
    "memory": "SIZE",
    "ports": "A-B",
    "cuts": "LAYER,...",
    "replace_within": "SECONDS",
    "rejoin_within": "SECONDS",
    "start_after": "SECONDS",
    "kills": '"node=3 step=5 at=2B1"',
    "writers": "NAME|MODULE:CLASS",
    "instance": "NAME",
    "market": "spot|on-demand",
    "node_price": "USD_PER_HOUR",
    "budget": "USD",
    "deadline": "TIME",
    "max_price": "USD_PER_HOUR",
    "etcd": "URL[,URL...]",
    "join": "TOKEN|@FILE|env",
    "address": "IP|interface",
    "etcd_ca": "FILE",
    "etcd_cert": "FILE",
    "etcd_key": "FILE",
    "secret_file": "FILE",
    "encrypt": "auto|on|off",
    "reduce": "auto|nccl|gloo",
}


@functools.cache
def field_docs() -> Mapping[str, str]:
    """The string under each field of RunConfig, by field, on one line."""
    tree = ast.parse(inspect.getsource(config_module))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == RunConfig.__name__)
    found: dict[str, str] = {}
    for statement, below in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[statement.target.id] = " ".join(text.split())
    return found


def config_option(field: str, **changes: Any) -> Any:
    """The typer option of a field of RunConfig, for a signature: Annotated[str | None, config_option("etcd_user")]."""
    settings = {"help": field_docs()[field], "metavar": _METAVARS.get(field), **changes}
    return typer.Option(option_name(field), **settings)


def with_config_options(fields: Collection[str] | None = None, *, required: Collection[str] = ()) -> Callable[[F], F]:
    """Decorate a command with an option for each of these fields of RunConfig, or for all fields.

    The command takes `**options`, which receives the values of the options; `build_config` makes a RunConfig of them.
    """

    def decorate(command: F) -> F:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        added = [_parameter(field, field in required) for field in fields or field_docs()]
        first = [parameter for parameter in own if parameter.default is parameter.empty]
        rest = [parameter for parameter in own if parameter.default is not parameter.empty]
        ordered = (*first, *added, *rest)
        command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered} | {"return": None}
        return command

    return decorate


def _parameter(field: str, required: bool) -> inspect.Parameter:
    default = next(found.default for found in dataclasses.fields(RunConfig) if found.name == field)
    kind: Any = _option_type(field)
    if isinstance(default, tuple) or field in _PARSERS:
        default = None
    return inspect.Parameter(
        field,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[kind, config_option(field)],
    )


def _option_type(field: str) -> Any:
    """The type that typer reads the option as. RunConfig checks the value."""
    if field in _PARSERS:
        return str | None
    hint = get_type_hints(RunConfig)[field]
    if hint == tuple[str, ...]:
        return list[str] | None
    return str if get_origin(hint) is Literal else hint  # typer reads literals from 0.19 on only


def build_config(options: Mapping[str, Any], losses: float | None = None) -> RunConfig:
    """The RunConfig of the values of options. `losses`: the deprecated option --losses. Raises UsageError."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, parse in _PARSERS.items():
        if name in given:
            given[name] = parse(given[name])
    if losses is not None:
        given["preemption_rate"] = preemption_rate(given.get("preemption_rate"), losses)
    return merge_options(None, given)


Losses = Annotated[float | None, typer.Option("--losses", hidden=True)]
"""The deprecated name of --preemption-rate."""


def preemption_rate(rate: float | None, losses: float | None) -> float:
    """The value of --preemption-rate, or of its deprecated name --losses, which prints a warning."""
    default = RunConfig().preemption_rate
    if losses is None:
        return default if rate is None else rate
    if rate not in (None, default):
        raise UsageError(f"--preemption-rate {rate:g} and --losses {losses:g} are both given: leave --losses out")
    print_error("--losses is deprecated: use --preemption-rate")
    return losses
