"""Read market traces in every known published format, detected by content.

events      time_ms,add|remove,node[,zone]        Bamboo, Oobleck; with the header t_s,kind,node,zone culm's own
counts      time,alive                            Parcae (ms), Bamboo's lab notes (s; with decimals h)
stamps      2021-07-26T18:42:00Z,alive            CloudWatch counters; only additions or only losses, by their header
gcloud      2021-12-11, 11:11:30, alive           Google Cloud monitors, in any order
skypilot    {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3, ...]}
parcae      [60000, "remove", {"nodes": [...]}]   one array per line
intervals   [{"interval": [alive, added, removed], "duration": 60000}, ...]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from culm.errors import UsageError
from culm.market.market_trace import (
    MarketTrace,
    NodeCount,
    NodeEvent,
    NodeEventKind,
    TraceValidator,
    events_from_counts,
)

TimeUnit: TypeAlias = Literal["ms", "s", "h"]
_SECONDS: dict[TimeUnit, float] = {"ms": 1e-3, "s": 1.0, "h": 3600.0}
_MILLISECONDS_FROM = 1e6
"""Whole numbers that reach this value are milliseconds: as seconds they would be eleven days."""
_MAX_NODES = 1_000_000
"""More nodes than this are a mistake, and would fill the memory."""

_TIMESTAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d"
_LINE_PATTERNS = {
    "events": r"-?[\d.eE+-]+\s*,\s*(add|remove|no-op)\s*,",
    "stamps": rf"(\d+,)?{_TIMESTAMP}",
    "gcloud": r"\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d:\d\d\s*,",
    "counts": r"-?\d[\d.eE+]*\s*,\s*-?\d+(\.\d*)?\s*$",
}


class NumberedLine(NamedTuple):
    number: int
    cells: tuple[str, ...]


@dataclass
class TraceLines:
    """The lines of a file while they are read. Invalid lines are collected, so that one error names all of them."""

    source: str
    lines: list[NumberedLine]
    header: tuple[str, ...] = ()
    errors: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_error(self, line: int, problem: str) -> None:
        self.errors.setdefault(line, problem)

    def raise_errors(self) -> None:
        """Raise UsageError if there are invalid lines: the problem of the first, and the numbers of the others."""
        if not self.errors:
            return
        first, *others = sorted(self.errors)
        also = f"; more bad lines: {', '.join(map(str, others[:10]))}" if others else ""
        raise UsageError(f"{self.source}, line {first}, {self.errors[first]}{also}")


def read_trace(path: str | Path, *, unit: TimeUnit | None = None) -> MarketTrace:
    """Read a market trace from a file in any of the formats above.

    `unit` sets the unit of times in events and counts, if the guess is wrong. Raises UsageError if the file is missing,
    has no known format, or has invalid lines, which are named by number.
    """
    path = Path(path)
    raw = _read_text(path)
    if raw.lstrip()[:1] in ("{", "["):
        return _parse_json(raw, path)
    return _parse_lines(raw, path, unit)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"the trace {str(path)!r} could not be read: {reason}") from error
    if not raw.strip():
        raise UsageError(f"the trace {str(path)!r} is empty: it needs at least one node")
    return raw


def _parse_lines(raw: str, path: Path, unit: TimeUnit | None) -> MarketTrace:
    stripped = ((number, line.strip()) for number, line in enumerate(raw.splitlines(), 1))
    numbered = [(number, line) for number, line in stripped if line and not line.startswith("#")]
    trace_format = next((name for _, line in numbered if (name := _detect_format(line))), None)
    if trace_format is None:
        raise UsageError(f"{path.name} is not a trace: no line is an event (time_ms,add,node) or a count (time,alive)")
    first = numbered[0][1]
    header = tuple(cell.strip().lower() for cell in first.split(",")) if not re.search(r"\d", first) else ()
    rows = [NumberedLine(number, tuple(cell.strip() for cell in line.split(","))) for number, line in numbered]
    text = TraceLines(path.name, rows[1:] if header else rows, header)
    return _READERS[trace_format](text, unit)


def _detect_format(line: str) -> str | None:
    return next((name for name, pattern in _LINE_PATTERNS.items() if re.match(pattern, line)), None)


def _parse_events(text: TraceLines, unit: TimeUnit | None) -> MarketTrace:
    scale = _SECONDS[unit or ("s" if "t_s" in text.header else "ms")]
    events = []
    for number, cells in text.lines:
        if len(cells) not in (3, 4):
            text.add_error(number, f"has {len(cells)} cells: write time,add or remove,node and perhaps a zone")
        elif cells[1] not in ("add", "remove", "no-op"):
            text.add_error(number, f"has the event {cells[1]!r}: use add or remove")
        elif (t := _parse_time(text, number, cells[0])) is not None and cells[1] != "no-op":
            events.append((number, NodeEvent(t * scale, cast("NodeEventKind", cells[1]), cells[2], *cells[3:])))
    return _build_trace(text, events)


def _build_trace(text: TraceLines, numbered_events: list[tuple[int, NodeEvent]]) -> MarketTrace:
    """The trace of these events. Raises UsageError if one is not possible."""
    validator = TraceValidator()
    for number, event in numbered_events:
        if problem := validator.apply_or_explain(event):
            text.add_error(number, problem)
    text.raise_errors()
    events = tuple(event for _, event in numbered_events)
    return MarketTrace(events, events[-1].t if events else 0.0, text.source, tuple(text.notes))


def _parse_counts(text: TraceLines, unit: TimeUnit | None) -> MarketTrace:
    rows = [(number, *pair) for number, cells in text.lines if (pair := _parse_count_row(text, number, cells))]
    text.raise_errors()
    scale = _SECONDS[unit or _guess_unit(text, [t for _, t, _ in rows])]
    return _trace_from_counts(text, [(number, t * scale, alive) for number, t, alive in rows])


def _parse_count_row(text: TraceLines, number: int, cells: tuple[str, ...]) -> tuple[float, int] | None:
    if len(cells) != 2:
        text.add_error(number, f"has {len(cells)} cells: write time,alive")
        return None
    t, alive = _parse_time(text, number, cells[0]), _parse_node_count(text, number, cells[1])
    return None if t is None or alive is None else (t, alive)


def _guess_unit(text: TraceLines, times: list[float]) -> TimeUnit:
    """Decimals are hours; large whole numbers are milliseconds."""
    decimals = any("." in cells[0] for _, cells in text.lines)
    unit: TimeUnit = "h" if decimals else "ms" if max(times) >= _MILLISECONDS_FROM else "s"
    text.notes.append(f"times are assumed to be in {unit}")
    return unit


def _trace_from_counts(text: TraceLines, rows: list[tuple[int, float, int]], zone: str = "") -> MarketTrace:
    """Rows (line, seconds, alive) in order of time; of several at the same time the last counts."""
    last = 0.0
    by_time: dict[float, int] = {}
    for number, t, alive in rows:
        if t < last:
            text.add_error(number, f"goes back in time, from {last:g} s to {t:g} s: sort the lines")
        if not 0 <= alive <= _MAX_NODES:
            text.add_error(number, f"has {alive:,} nodes alive: use a whole number from 0 to {_MAX_NODES:,}")
        last = max(t, last)
        by_time[t] = alive
    text.raise_errors()
    text.notes.append("the trace does not say which nodes were lost: they are drawn at random")
    counts = [NodeCount(t, alive) for t, alive in by_time.items()]
    return MarketTrace(events_from_counts(counts, zone=zone), last, text.source, tuple(text.notes))


def _parse_timestamps(text: TraceLines, _: TimeUnit | None) -> MarketTrace:
    """Timestamps with a number: alive, or, with the headers of Bamboo's lab notes, added or lost."""
    at = text.header.index("timestamp") if "timestamp" in text.header else -2
    rows = []
    for number, cells in text.lines:
        moment = _parse_timestamp(text, number, cells[at] if len(cells) > 1 else cells[0])
        amount = _parse_node_count(text, number, cells[-1])
        if moment is not None and amount is not None:
            rows.append((number, moment, amount))
    text.raise_errors()
    convert, since_start = _COUNT_CONVERTERS.get(text.header), _seconds_since_first(rows, text)
    return _trace_from_counts(text, convert(since_start, text) if convert else since_start)


_CountRows: TypeAlias = list[tuple[int, float, int]]


def _seconds_since_first(rows: list[tuple[int, datetime, int]], text: TraceLines) -> _CountRows:
    """Seconds since the first row. A step back of more than 12 hours is a date that was not advanced at midnight."""
    shift, last, count_rows = timedelta(0), rows[0][1], []
    for number, moment, amount in rows:
        if moment + shift < last - timedelta(hours=12):
            shift += timedelta(days=1)
            text.notes.append(f"line {number}: the date was not advanced at midnight")
        last = moment + shift
        count_rows.append((number, (last - rows[0][1]).total_seconds(), amount))
    return count_rows


def _counts_from_additions(rows: _CountRows, text: TraceLines) -> _CountRows:
    text.notes.append("the file has only additions: no node is ever lost")
    alive, count_rows = 0, []
    for number, t, added in rows:
        alive += added
        count_rows.append((number, t, alive))
    return count_rows


def _counts_from_removals(rows: _CountRows, text: TraceLines) -> _CountRows:
    text.notes.append("the file has only losses: all nodes are assumed to be present from the start")
    alive = sum(lost for _, _, lost in rows)
    count_rows = [(rows[0][0], 0.0, alive)]
    for number, t, lost in rows:
        alive -= lost
        count_rows.append((number, max(t, 1.0), alive))
    return count_rows


_COUNT_CONVERTERS: dict[tuple[str, ...], Callable[[_CountRows, TraceLines], _CountRows]] = {
    ("", "timestamp", "dt", "count"): _counts_from_additions,
    ("", "dt", "count"): _counts_from_removals,
    ("timestamp", "number"): _counts_from_removals,
}


def _parse_gcloud(text: TraceLines, _: TimeUnit | None) -> MarketTrace:
    """Several monitors are written one after the other: the lines are sorted, and the last line for a time counts."""
    rows = []
    for number, cells in text.lines:
        moment = _parse_timestamp(text, number, " ".join(cells[:2]))
        alive = _parse_node_count(text, number, cells[-1]) if len(cells) == 3 else None
        if len(cells) != 3:
            text.add_error(number, f"has {len(cells)} cells: write date, time, alive")
        if moment is not None and alive is not None:
            rows.append((moment, number, alive))
    text.raise_errors()
    rows.sort()
    return _trace_from_counts(text, [(n, (t - rows[0][0]).total_seconds(), alive) for t, n, alive in rows])


def _parse_json(raw: str, path: Path) -> MarketTrace:
    text = TraceLines(path.name, [])
    try:
        document = json.loads(raw)
    except json.JSONDecodeError:
        return _parse_parcae(raw, text)
    if isinstance(document, dict):
        return _parse_skypilot(document, text, path.stem.split("_")[0])
    if isinstance(document, list) and document and isinstance(document[0], dict):
        return _parse_intervals(document, text)
    return _parse_parcae(raw, text)


def _parse_skypilot(document: dict[str, Any], text: TraceLines, zone: str) -> MarketTrace:
    meta, data = document.get("metadata"), document.get("data")
    gap = meta.get("gap_seconds") if isinstance(meta, dict) else None
    if not (isinstance(gap, (int, float)) and 0 < gap < math.inf and isinstance(data, list) and data):
        raise UsageError(f"{text.source} is not a trace: its JSON needs metadata.gap_seconds above 0 and a list 'data'")
    for tick, alive in enumerate(data):
        if not (isinstance(alive, int) and alive >= 0):
            raise UsageError(f"{text.source}, data[{tick}] is {alive!r}: use a whole number of at least 0")
    return _trace_from_counts(text, [(tick, tick * gap, alive) for tick, alive in enumerate(data)], zone)


def _parse_intervals(entries: list[Any], text: TraceLines) -> MarketTrace:
    """Parcae's intervals: [alive before, added, removed], with a duration in milliseconds."""
    rows, t = [], 0.0
    for index, entry in enumerate(entries):
        try:
            before, added, removed = entry["interval"]
            rows.append((index, t, int(before + added - removed)))
            t += entry["duration"] / 1e3
        except (TypeError, KeyError, ValueError):
            fix = "it needs interval = [alive, added, removed] and duration"
            raise UsageError(f"{text.source}, entry {index}, is not an interval: {fix}") from None
    return _trace_from_counts(text, [*rows, (len(rows), t, rows[-1][2])])


def _parse_parcae(raw: str, text: TraceLines) -> MarketTrace:
    events: list[tuple[int, NodeEvent]] = []
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            events += ((number, event) for event in _parse_parcae_line(text, number, line))
    return _build_trace(text, events)


def _parse_parcae_line(text: TraceLines, number: int, line: str) -> Iterator[NodeEvent]:
    try:
        t, kind, fields = json.loads(line)
        nodes = [str(node) for node in fields["nodes"]]
        if kind not in ("add", "remove", "no-op"):
            text.add_error(number, f"has the event {kind!r}: use add, remove or no-op")
        else:
            yield from (NodeEvent(t / 1e3, kind, node) for node in nodes if kind != "no-op")
    except (ValueError, TypeError, KeyError):
        text.add_error(number, 'is not an event: write [time_ms, "add", {"nodes": [...]}]')


def _parse_time(text: TraceLines, line: int, cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        text.add_error(line, f"has the time {cell!r}: use a number")
        return None
    return value


def _parse_node_count(text: TraceLines, line: int, cell: str) -> int | None:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if value < 0 or not value.is_integer():
        text.add_error(line, f"has the count {cell!r}: use a whole number of at least 0")
        return None
    return int(value)


def _parse_timestamp(text: TraceLines, line: int, cell: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(cell.replace("Z", "+00:00"))
        return moment if moment.tzinfo is None else moment.astimezone(UTC).replace(tzinfo=None)
    except ValueError:
        text.add_error(line, f"has the time {cell!r}: write it as 2021-07-26 18:42:00")
        return None


_READERS: dict[str, Callable[[TraceLines, TimeUnit | None], MarketTrace]] = {
    "events": _parse_events,
    "counts": _parse_counts,
    "stamps": _parse_timestamps,
    "gcloud": _parse_gcloud,
}
