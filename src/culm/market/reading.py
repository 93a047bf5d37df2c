"""Reading traces: every published form that we know of, told apart by what is inside.

events      time_ms,add|remove,node[,zone]        Bamboo, Oobleck; with the header t_s,kind,node,zone our own
counts      time,alive                            Parcae (ms), Bamboo's lab notes (s; with decimals h)
stamps      2021-07-26T18:42:00Z,alive            CloudWatch counters; additions or losses alone, by their header
gcloud      2021-12-11, 11:11:30, alive           Google Cloud monitors, in any order
skypilot    {"metadata": {"gap_seconds": 300}, "data": [4, 4, 3, ...]}
parcae      [60000, "remove", {"nodes": [...]}]   one array a line
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
from culm.market.trace import Count, Event, Kind, Presence, Trace, from_counts

Unit: TypeAlias = Literal["ms", "s", "h"]
_SECONDS: dict[Unit, float] = {"ms": 1e-3, "s": 1.0, "h": 3600.0}
_MILLISECONDS_FROM = 1e6
"""Whole numbers that reach this far are milliseconds: as seconds they would be eleven days."""
_MOST = 1_000_000
"""Nodes at once: more is a mistake, and would fill the memory."""

_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d"
_FORMS = {
    "events": r"-?[\d.eE+-]+\s*,\s*(add|remove|no-op)\s*,",
    "stamps": rf"(\d+,)?{_STAMP}",
    "gcloud": r"\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d:\d\d\s*,",
    "counts": r"-?\d[\d.eE+]*\s*,\s*-?\d+(\.\d*)?\s*$",
}


class Line(NamedTuple):
    number: int
    cells: tuple[str, ...]


@dataclass
class Text:
    """The lines of a file while they are read. Bad ones are collected, so that all of them are named at once."""

    source: str
    lines: list[Line]
    header: tuple[str, ...] = ()
    bad: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def wrong(self, line: int, what: str) -> None:
        self.bad.setdefault(line, what)

    def settle(self) -> None:
        """Raise UsageError if there were bad lines: what is wrong with the first, and where the others are."""
        if not self.bad:
            return
        first, *others = sorted(self.bad)
        also = f"; more bad lines: {', '.join(map(str, others[:10]))}" if others else ""
        raise UsageError(f"{self.source}, line {first}, {self.bad[first]}{also}")


def read_trace(path: str | Path, *, unit: Unit | None = None) -> Trace:
    """The trace in a file of any of the forms above.

    `unit` says what the times of events and counts are in where the guess is wrong. Raises UsageError: the file is
    missing or of no known form, or has bad lines, named by number.
    """
    path = Path(path)
    raw = _raw(path)
    if raw.lstrip()[:1] in ("{", "["):
        return _json(raw, path)
    return _lines(raw, path, unit)


def _raw(path: Path) -> str:
    try:
        raw = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"the trace {str(path)!r} could not be read: {reason}") from error
    if not raw.strip():
        raise UsageError(f"the trace {str(path)!r} is empty: it needs at least one node")
    return raw


def _lines(raw: str, path: Path, unit: Unit | None) -> Trace:
    stripped = ((number, line.strip()) for number, line in enumerate(raw.splitlines(), 1))
    numbered = [(number, line) for number, line in stripped if line and not line.startswith("#")]
    form = next((name for _, line in numbered if (name := _form(line))), None)
    if form is None:
        raise UsageError(
            f"{path.name} is no trace: no line of it is an event (time_ms,add,node) or a count (time,alive)"
        )
    first = numbered[0][1]
    header = tuple(cell.strip().lower() for cell in first.split(",")) if not re.search(r"\d", first) else ()
    rows = [Line(number, tuple(cell.strip() for cell in line.split(","))) for number, line in numbered]
    text = Text(path.name, rows[1:] if header else rows, header)
    return _READERS[form](text, unit)


def _form(line: str) -> str | None:
    return next((name for name, pattern in _FORMS.items() if re.match(pattern, line)), None)


def _events(text: Text, unit: Unit | None) -> Trace:
    scale = _SECONDS[unit or ("s" if "t_s" in text.header else "ms")]
    found = []
    for number, cells in text.lines:
        if len(cells) not in (3, 4):
            text.wrong(number, f"has {len(cells)} cells: write time,add or remove,node and perhaps a zone")
        elif cells[1] not in ("add", "remove", "no-op"):
            text.wrong(number, f"has the event {cells[1]!r}: use add or remove")
        elif (t := _number(text, number, cells[0])) is not None and cells[1] != "no-op":
            found.append((number, Event(t * scale, cast("Kind", cells[1]), cells[2], *cells[3:])))
    return _checked(text, found)


def _checked(text: Text, found: list[tuple[int, Event]]) -> Trace:
    """The trace of these events, if each could happen."""
    there = Presence()
    for number, event in found:
        if fault := there.fault(event):
            text.wrong(number, fault)
    text.settle()
    events = tuple(event for _, event in found)
    return Trace(events, events[-1].t if events else 0.0, text.source, tuple(text.notes))


def _counts(text: Text, unit: Unit | None) -> Trace:
    rows = [(number, *pair) for number, cells in text.lines if (pair := _pair(text, number, cells))]
    text.settle()
    scale = _SECONDS[unit or _guess(text, [t for _, t, _ in rows])]
    return _counted(text, [(number, t * scale, alive) for number, t, alive in rows])


def _pair(text: Text, number: int, cells: tuple[str, ...]) -> tuple[float, int] | None:
    if len(cells) != 2:
        text.wrong(number, f"has {len(cells)} cells: write time,alive")
        return None
    t, alive = _number(text, number, cells[0]), _alive(text, number, cells[1])
    return None if t is None or alive is None else (t, alive)


def _guess(text: Text, times: list[float]) -> Unit:
    """Decimals are hours; large whole numbers milliseconds."""
    decimals = any("." in cells[0] for _, cells in text.lines)
    unit: Unit = "h" if decimals else "ms" if max(times) >= _MILLISECONDS_FROM else "s"
    text.notes.append(f"times taken to be in {unit}")
    return unit


def _counted(text: Text, rows: list[tuple[int, float, int]], zone: str = "") -> Trace:
    """Rows (line, seconds, alive) in order of time; the last of several at the same time holds."""
    last = 0.0
    by_time: dict[float, int] = {}
    for number, t, alive in rows:
        if t < last:
            text.wrong(number, f"goes back in time, from {last:g} s to {t:g} s: sort the lines")
        if not 0 <= alive <= _MOST:
            text.wrong(number, f"has {alive:,} nodes alive: use a whole number from 0 to {_MOST:,}")
        last = max(t, last)
        by_time[t] = alive
    text.settle()
    text.notes.append("who was lost is not recorded: victims are drawn")
    counts = [Count(t, alive) for t, alive in by_time.items()]
    return Trace(from_counts(counts, zone=zone), last, text.source, tuple(text.notes))


def _stamps(text: Text, _: Unit | None) -> Trace:
    """Time stamps with a number: alive, or with the headers of Bamboo's lab notes added or lost."""
    at = text.header.index("timestamp") if "timestamp" in text.header else -2
    rows = []
    for number, cells in text.lines:
        moment = _moment(text, number, cells[at] if len(cells) > 1 else cells[0])
        amount = _alive(text, number, cells[-1])
        if moment is not None and amount is not None:
            rows.append((number, moment, amount))
    text.settle()
    counting, since_start = _COUNTING.get(text.header), _since_start(rows, text)
    return _counted(text, counting(since_start, text) if counting else since_start)


_Rows: TypeAlias = list[tuple[int, float, int]]


def _since_start(rows: list[tuple[int, datetime, int]], text: Text) -> _Rows:
    """Seconds since the first. A step back of most of a day is a date that was not advanced at midnight."""
    shift, last, found = timedelta(0), rows[0][1], []
    for number, moment, amount in rows:
        if moment + shift < last - timedelta(hours=12):
            shift += timedelta(days=1)
            text.notes.append(f"line {number}: the date was not advanced at midnight")
        last = moment + shift
        found.append((number, (last - rows[0][1]).total_seconds(), amount))
    return found


def _additions(rows: _Rows, text: Text) -> _Rows:
    text.notes.append("the file has additions alone: nobody is ever lost")
    alive, found = 0, []
    for number, t, added in rows:
        alive += added
        found.append((number, t, alive))
    return found


def _losses(rows: _Rows, text: Text) -> _Rows:
    text.notes.append("the file has losses alone: all were taken to be there from the start")
    alive = sum(lost for _, _, lost in rows)
    found = [(rows[0][0], 0.0, alive)]
    for number, t, lost in rows:
        alive -= lost
        found.append((number, max(t, 1.0), alive))
    return found


_COUNTING: dict[tuple[str, ...], Callable[[_Rows, Text], _Rows]] = {
    ("", "timestamp", "dt", "count"): _additions,
    ("", "dt", "count"): _losses,
    ("timestamp", "number"): _losses,
}


def _gcloud(text: Text, _: Unit | None) -> Trace:
    """Several monitors were written one after the other: sorted here, the last line for a time holds."""
    rows = []
    for number, cells in text.lines:
        moment = _moment(text, number, " ".join(cells[:2]))
        alive = _alive(text, number, cells[-1]) if len(cells) == 3 else None
        if len(cells) != 3:
            text.wrong(number, f"has {len(cells)} cells: write date, time, alive")
        if moment is not None and alive is not None:
            rows.append((moment, number, alive))
    text.settle()
    rows.sort()
    return _counted(text, [(n, (t - rows[0][0]).total_seconds(), alive) for t, n, alive in rows])


def _json(raw: str, path: Path) -> Trace:
    text = Text(path.name, [])
    try:
        found = json.loads(raw)
    except json.JSONDecodeError:
        return _parcae(raw, text)
    if isinstance(found, dict):
        return _skypilot(found, text, path.stem.split("_")[0])
    if isinstance(found, list) and found and isinstance(found[0], dict):
        return _intervals(found, text)
    return _parcae(raw, text)


def _skypilot(found: dict[str, Any], text: Text, zone: str) -> Trace:
    meta, data = found.get("metadata"), found.get("data")
    gap = meta.get("gap_seconds") if isinstance(meta, dict) else None
    if not (isinstance(gap, (int, float)) and 0 < gap < math.inf and isinstance(data, list) and data):
        raise UsageError(f"{text.source} is no trace: its JSON needs metadata.gap_seconds above 0 and a list 'data'")
    for tick, alive in enumerate(data):
        if not (isinstance(alive, int) and alive >= 0):
            raise UsageError(f"{text.source}, data[{tick}] is {alive!r}: use a whole number of at least 0")
    return _counted(text, [(tick, tick * gap, alive) for tick, alive in enumerate(data)], zone)


def _intervals(found: list[Any], text: Text) -> Trace:
    """Parcae's intervals: [alive before, added, removed] for so many milliseconds."""
    rows, t = [], 0.0
    for index, entry in enumerate(found):
        try:
            before, added, removed = entry["interval"]
            rows.append((index, t, int(before + added - removed)))
            t += entry["duration"] / 1e3
        except (TypeError, KeyError, ValueError):
            fix = "it needs interval = [alive, added, removed] and duration"
            raise UsageError(f"{text.source}, entry {index}, is no interval: {fix}") from None
    return _counted(text, [*rows, (len(rows), t, rows[-1][2])])


def _parcae(raw: str, text: Text) -> Trace:
    found: list[tuple[int, Event]] = []
    for number, line in enumerate(raw.splitlines(), 1):
        if line.strip():
            found += ((number, event) for event in _parcae_line(text, number, line))
    return _checked(text, found)


def _parcae_line(text: Text, number: int, line: str) -> Iterator[Event]:
    try:
        t, kind, fields = json.loads(line)
        nodes = [str(node) for node in fields["nodes"]]
        if kind not in ("add", "remove", "no-op"):
            text.wrong(number, f"has the event {kind!r}: use add, remove or no-op")
        else:
            yield from (Event(t / 1e3, kind, node) for node in nodes if kind != "no-op")
    except (ValueError, TypeError, KeyError):
        text.wrong(number, 'is no event: write [time_ms, "add", {"nodes": [...]}]')


def _number(text: Text, line: int, cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        text.wrong(line, f"has the time {cell!r}: use a number")
        return None
    return value


def _alive(text: Text, line: int, cell: str) -> int | None:
    try:
        value = float(cell)
    except ValueError:
        value = -1.0
    if value < 0 or not value.is_integer():
        text.wrong(line, f"has the count {cell!r}: use a whole number of at least 0")
        return None
    return int(value)


def _moment(text: Text, line: int, cell: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(cell.replace("Z", "+00:00"))
        return found if found.tzinfo is None else found.astimezone(UTC).replace(tzinfo=None)
    except ValueError:
        text.wrong(line, f"has the time {cell!r}: write it as 2021-07-26 18:42:00")
        return None


_READERS: dict[str, Callable[[Text, Unit | None], Trace]] = {
    "events": _events,
    "counts": _counts,
    "stamps": _stamps,
    "gcloud": _gcloud,
}
