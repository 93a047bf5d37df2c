"""A published table next to a simulated one: as Markdown text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TableRequest:
    """Inputs of a table."""

    seeds: int | None = None
    """Number of runs; None: as many as in the paper, or as are enough."""
    traces: Path | None = None
    """Folder of the published traces, if available."""
    progress: Callable[[str], None] = lambda _: None


@dataclass(frozen=True)
class PaperTable:
    """Rows for programs, cells for people."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"rows": list(self.rows), **self.extra, "notes": list(self.notes)}

    def to_markdown(self) -> str:
        """A Markdown table with padded columns, and the notes below."""
        grid = [list(self.columns), *(list(row) for row in self.cells)]
        widths = [max(len(row[column]) for row in grid) for column in range(len(self.columns))]
        lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in grid]
        rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
        notes = [f"- {note}" for note in self.notes]
        return "\n".join([f"## {self.title}", "", lines[0], rule, *lines[1:], "", *notes]) + "\n"


@dataclass(frozen=True)
class PaperTableSet:
    """Several tables on one page."""

    title: str
    tables: Sequence[PaperTable]
    preface: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        return {"title": self.title, "sheets": [{"title": s.title, **s.as_json()} for s in self.tables]}

    def to_markdown(self) -> str:
        return "\n".join([f"# {self.title}", "", *self.preface, "", *(table.to_markdown() for table in self.tables)])


def percent_difference(ours: float, theirs: float) -> str:
    """The relative difference in percent."""
    return f"{ours / theirs - 1:+.1%}"
