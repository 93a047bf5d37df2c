"""Numbers in texts: counts with their nouns, sizes in bytes, and times."""

from __future__ import annotations

import re

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def count_noun(number: int, noun: str) -> str:
    """3, "stage" -> "3 stages"."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def format_bytes(size: float) -> str:
    """Bytes as a readable number: 8.00 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size:.0f} bytes"


def format_hours(hours: float) -> str:
    """Hours as a readable time: 40 min, 5.2 h, 3.1 days."""
    if hours == float("inf"):
        return "never"
    if hours < 1:
        return f"{hours * 60:.3g} min"
    return f"{hours:.3g} h" if hours < 72 else f"{hours / 24:.3g} days"


def parse_seconds(text: str) -> float | None:
    """The seconds that a time means: 90, 90s, 10min (10m), 48h or 3d; None: it is not a time."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|)", text.strip().lower())
    return None if match is None else float(match[1]) * _SECONDS[match[2]]
