"""Mapped: a map-style data set with a function applied to its items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Mapped:
    """The items of a map-style data set (such as one of Hugging Face `datasets`), each passed through `function`."""

    def __init__(self, data: Any, function: Callable[[Any], Any]) -> None:
        self._data, self._function = data, function

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._function(self._data[range(len(self))[index]])
