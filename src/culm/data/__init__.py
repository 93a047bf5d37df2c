"""Data sets of files: text, token files, JSONL, images, and streams.

Packed      text or JSONL through a tokenizer into packed sequences, in memory
Tokens      packed sequences of a memory-mapped token file, made by `culm data tokenize`
Jsonl       records of JSONL files
Images      a folder with one subfolder per class
Mapped      another data set with a function applied to its items
Stream      an iterable data set with a position: IterableDataset, streaming datasets, loaders with state_dict
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from culm.data.image_folder import Images
    from culm.data.json_lines import Jsonl
    from culm.data.mapped import Mapped
    from culm.data.packed_text import Packed
    from culm.data.stream import Stream
    from culm.data.token_file import TokenFileReport, Tokens, tokenize_files
    from culm.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Images",
    "Jsonl",
    "Mapped",
    "Packed",
    "Stream",
    "TokenFileReport",
    "Tokenizer",
    "Tokens",
    "load_tokenizer",
    "tokenize_files",
]

_MODULES = {
    "Images": "image_folder",
    "Jsonl": "json_lines",
    "Mapped": "mapped",
    "Packed": "packed_text",
    "Stream": "stream",
    "TokenFileReport": "token_file",
    "Tokenizer": "tokenizer",
    "Tokens": "token_file",
    "load_tokenizer": "tokenizer",
    "tokenize_files": "token_file",
}
"""Imported on first use: the Job imports this package, and commands that read no data start without numpy."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"culm.data.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'culm.data' has no attribute {name!r}")
