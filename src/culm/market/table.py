"""Rows of a CSV file with a header, each of which knows its line, so that a bad one can be pointed at."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from culm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclass(frozen=True)
class Row:
    """One line. The getters raise UsageError, which names file, line, column, the value found and the fix."""

    source: str
    line: int
    cells: Mapping[str, str]

    def has(self, column: str) -> bool:
        return bool(self.cells.get(column, ""))

    def text(self, column: str, default: str | None = None) -> str:
        """The cell; an empty one gives the default, and without a default it is an error."""
        value = self.cells.get(column, "") or default
        if value is None:
            raise self.wrong(f"has no {column}: fill it in")
        return value

    def number(self, column: str, default: float | None = None) -> float:
        """A finite number of at least 0."""
        text = self.text(column, None if default is None else str(default))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise self.wrong(f"has {column} {text!r}: use a number of at least 0")
        return value

    def whole(self, column: str, default: int | None = None) -> int:
        value = self.number(column, default)
        if not value.is_integer():
            raise self.wrong(f"has {column} {value!r}: use a whole number")
        return int(value)

    def day(self, column: str) -> date | None:
        """A date as 2026-08-22; None where the cell is empty."""
        text = self.cells.get(column, "")
        try:
            return date.fromisoformat(text) if text else None
        except ValueError:
            raise self.wrong(f"has {column} {text!r}: write a date as 2026-08-22") from None

    def wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.source}, line {self.line}, {what}")


def read_rows(text: str, source: str, required: Collection[str]) -> list[Row]:
    """The rows below the header. Raises UsageError when a required column is missing or a row has other cells."""
    reader = csv.reader(text.splitlines())
    header = [name.strip().lower() for name in next(reader, [])]
    for column in required:
        if column not in header:
            raise UsageError(f"{source}, line 1, has no column {column!r}: it needs {', '.join(required)}")
    rows = []
    for cells in filter(any, reader):
        row = Row(source, reader.line_num, dict(zip(header, map(str.strip, cells), strict=False)))
        if len(cells) != len(header):
            raise row.wrong(f"has {len(cells)} cells: the header names {len(header)}")
        rows.append(row)
    return rows
