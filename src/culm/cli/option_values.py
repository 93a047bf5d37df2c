"""Parsers of options with a notation of their own. Each raises UsageError for a text that it cannot read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from culm.errors import UsageError
from culm.schedule import Costs
from culm.text_format import parse_seconds

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_COSTS = {"F": "forward", "I": "input", "W": "weight", "R": "reduce", "S": "step"}


def parse_assignments(given: Sequence[str], option: str = "--set", example: str = "micro_batch=2") -> dict[str, str]:
    """The names and values of repeated options such as `--set field=value`."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            form = "field=value" if option == "--set" else "name=value"
            raise UsageError(f"{option} {text!r} is not an assignment: write {form}, as in {option} {example}")
        if name in found:
            raise UsageError(f"{option} names {name} twice: give it one value")
        found[name] = value
    return found


def parse_size(text: str) -> int:
    """`--memory`: bytes, or a number with a unit, as in 16GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"--memory {text!r} is not a size: write bytes, or a number with a unit, as in 16GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_ports(text: str) -> tuple[int, int]:
    """`--ports A-B`: the first and the last port of a range."""
    match = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    if match is None:
        raise UsageError(f"--ports {text!r} is not a range: write the first and the last port, as in 7000-7100")
    return int(match[1]), int(match[2])


def parse_duration(text: str) -> float:
    """`--deadline 48h`: seconds, or a number with the unit s, min, h or d."""
    seconds = parse_seconds(text)
    if seconds is None:
        raise UsageError(f"--deadline {text!r} is not a time: write it as in --deadline 48h, 90min or 3d")
    return seconds


def parse_usd(text: str) -> float:
    """`--budget 500`: dollars, also as $500."""
    match = re.fullmatch(r"\$?\s*(\d+(?:\.\d+)?)\s*(?:\$|usd)?", text.strip().lower())
    if match is None:
        raise UsageError(f"--budget {text!r} is not an amount: write dollars, as in --budget 500")
    return float(match[1])


def parse_count(text: str) -> float:
    """`--samples 20M`: a number, with K, M, B or T."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", text.strip().upper())
    if match is None or not float(match[1]):
        raise UsageError(f"--samples {text!r} is not a number: write it as in --samples 20M")
    return float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}[match[2]]


def parse_cuts(text: str) -> tuple[int, ...]:
    """`--cuts 3,6`: the first layers of segments 1, 2, ..."""
    if not re.fullmatch(r"\d+(,\d+)*", text.strip()):
        raise UsageError(
            f"--cuts {text!r} is not a list of layers: write the first of each later segment, as in --cuts 3,6"
        )
    return tuple(map(int, text.split(",")))


def parse_action_costs(text: str) -> Costs:
    """`--times F=1,I=1,W=1`: the costs of the kinds of actions; kinds that are not named cost one unit."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        kind, _, value = part.partition("=")
        name = _COSTS.get(kind.strip().upper())
        try:
            number = float(value)
        except ValueError:
            name = None
        if name is None:
            raise UsageError(f"--times has {part!r}: write kinds out of {', '.join(_COSTS)}, as in F=1,I=1,W=0.5")
        found[name] = number
    return Costs(**found)
