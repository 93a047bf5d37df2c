"""Rows of a CSV file with a header. Each row knows its line number, so that errors can name it."""

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
class CsvRow:
    """One line. The getters raise UsageError, which names file, line, column, value and fix."""

    source: str
    line: int
    cells: Mapping[str, str]

    def has_value(self, column: str) -> bool:
        return bool(self.cells.get(column, ""))

    def get_text(self, column: str, default: str | None = None) -> str:
        """The cell, or the default if it is empty. Raises UsageError if there is no default either."""
        value = self.cells.get(column, "") or default
        if value is None:
            raise self.error(f"has no {column}: fill it in")
        return value

    def get_number(self, column: str, default: float | None = None) -> float:
        """A finite number of at least 0."""
        text = self.get_text(column, None if default is None else str(default))
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0):
            raise self.error(f"has {column} {text!r}: use a number of at least 0")
        return value

    def get_optional_number(self, column: str, default: float | None = None) -> float | None:
        """A finite number of at least 0, or the default if the cell is empty."""
        return self.get_number(column) if self.has_value(column) else default

    def get_int(self, column: str, default: int | None = None) -> int:
        value = self.get_number(column, default)
        if not value.is_integer():
            raise self.error(f"has {column} {value!r}: use a whole number")
        return int(value)

    def get_date(self, column: str) -> date | None:
        """A date as 2026-08-22; None if the cell is empty."""
        text = self.cells.get(column, "")
        try:
            return date.fromisoformat(text) if text else None
        except ValueError:
            raise self.error(f"has {column} {text!r}: write a date as 2026-08-22") from None

    def error(self, problem: str) -> UsageError:
        return UsageError(f"{self.source}, line {self.line}, {problem}")


def read_rows(text: str, source: str, required: Collection[str]) -> list[CsvRow]:
    """The rows after the header. Raises UsageError for a missing required column or a row of another length."""
    reader = csv.reader(text.splitlines())
    header = [name.strip().lower() for name in next(reader, [])]
    for column in required:
        if column not in header:
            raise UsageError(f"{source}, line 1, has no column {column!r}: it needs {', '.join(required)}")
    rows = []
    for cells in filter(any, reader):
        row = CsvRow(source, reader.line_num, dict(zip(header, map(str.strip, cells), strict=False)))
        if len(cells) != len(header):
            raise row.error(f"has {len(cells)} cells: the header names {len(header)}")
        rows.append(row)
    return rows
