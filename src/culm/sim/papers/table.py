"""A table that was published, ours beside it: as text that is Markdown too, and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """What a table may be made from."""

    seeds: int | None = None
    """How many runs; None: as many as the paper had, or as are enough."""
    traces: Path | None = None
    """Where the published traces lie, if they are at hand."""
    progress: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class Sheet:
    """Rows for programs, cells for people."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"rows": list(self.rows), **self.extra, "notes": list(self.notes)}

    def text(self) -> str:
        """A Markdown table with padded columns, and the notes below."""
        grid = [list(self.columns), *(list(row) for row in self.cells)]
        widths = [max(len(row[column]) for row in grid) for column in range(len(self.columns))]
        lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in grid]
        rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"## {self.title}", "", lines[0], rule, *lines[1:], "", *notes]) + "\n"


@dataclass(frozen=True)
class Book:
    """Several sheets on one page."""

    title: str
    sheets: Sequence[Sheet]
    preface: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "sheets": [{"title": s.title, **s.as_json()} for s in self.sheets]}

    def text(self) -> str:
        return "\n".join([f"# {self.title}", "", *self.preface, "", *(sheet.text() for sheet in self.sheets)])


def share(ours: float, theirs: float) -> str:
    """How far apart, in percent."""
    return f"{ours / theirs - 1:+.1%}"
