"""Options that are more than a number or a name. Each refuses what it can not read in one sentence."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from culm.errors import UsageError
from culm.schedule import Costs

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_COSTS = {"F": "forward", "I": "input", "W": "weight", "R": "reduce", "S": "step"}
_LAST_PORT = 65535


def assignments(given: Sequence[str]) -> dict[str, str]:
    """`--set field=value`, repeated."""
    found: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {text!r} is no assignment: write field=value, as in --set micro_batch=2")
        if name in found:
            raise UsageError(f"--set names {name} twice: give it one value")
        found[name] = value
    return found


def size(text: str | None) -> int | None:
    """`--memory`: bytes, or a number with a unit, as in 16GiB."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"--memory {text!r} is no size: write bytes, or a number with a unit, as in 16GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def ports(text: str | None) -> tuple[int, int] | None:
    """`--ports A-B`, both included."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    if match is None:
        raise UsageError(f"--ports {text!r} is no range: write the first and the last port, as in 7000-7100")
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last <= _LAST_PORT:
        raise UsageError(f"--ports {text} is no range: use 1 to {_LAST_PORT}, the smaller number first")
    return first, last


def check_ports(span: tuple[int, int] | None, nodes: int, host: str = "127.0.0.1") -> None:
    """Refuse a range in which the nodes can not all listen: each needs a port for its agent and one for its worker."""
    if span is None:
        return
    needed, free = 2 * nodes, 0
    for port in range(span[0], span[1] + 1):
        free += _is_free(host, port)
        if free == needed:
            return
    raise UsageError(
        f"--ports {span[0]}-{span[1]} has {free} free ports on {host}, and {nodes} nodes need {needed}: "
        "give a wider range, or another one"
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError:
            return False
    return True


def times(text: str) -> Costs:
    """`--times F=1,I=1,W=1`: what each kind of action costs; what is not named keeps its unit cost."""
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
