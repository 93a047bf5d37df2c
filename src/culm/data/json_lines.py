"""Jsonl: records of JSONL files as a map-style data set, read from disk one line at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from culm.data.text_chunks import Files, find_files, parse_json_line
from culm.errors import JobError


class Jsonl:
    """The lines of JSONL files, each a JSON object, as items.

    `function` turns a record into an item (input, target); without it an item is the record, for `Job.collate` to turn
    into tensors. Only the positions of the lines are in memory. Empty lines are no items. Raises JobError for a file
    that does not exist or has no line; a line that is not valid JSON raises when it is read, naming the place.
    """

    def __init__(self, files: Files, function: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self.files = find_files(files)
        self._function = function
        self._offsets = [_line_offsets(path) for path in self.files]
        self._first_items = [0, *accumulate(map(len, self._offsets))]
        if not self._first_items[-1]:
            raise JobError(f"{self.files[0]!r} has no line: Jsonl needs at least one record")

    def __len__(self) -> int:
        return self._first_items[-1]

    def __getitem__(self, index: int) -> Any:
        record = self.record(index)
        return record if self._function is None else self._function(record)

    def record(self, index: int) -> dict[str, Any]:
        """The record as it is in the file."""
        number = range(len(self))[index]
        file = bisect_right(self._first_items, number) - 1
        offset = int(self._offsets[file][number - self._first_items[file]])
        with Path(self.files[file]).open("rb") as opened:
            opened.seek(offset)
            return parse_json_line(opened.readline(), self.files[file], offset)


def _line_offsets(path: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    offsets, at = [], 0
    with Path(path).open("rb") as file:
        for line in file:
            if line.strip():
                offsets.append(at)
            at += len(line)
    return np.asarray(offsets, dtype=np.int64)
