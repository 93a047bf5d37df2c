"""Text files in chunks that are the same for every reader: the units of work of tokenization."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

from culm.data.tokenizer import Tokenizer
from culm.errors import JobError

Files: TypeAlias = "str | PathLike[str] | Iterable[str | PathLike[str]]"
"""A path, a pattern such as "books/*.txt", or several of them."""

CHUNK_BYTES = 1 << 20
"""A chunk ends at the first line end after this many bytes. Tokens depend on it: it must not depend on the machine."""
_JSON_LINES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class TextChunk:
    """A range of bytes of one file that begins and ends at a line."""

    path: str
    start: int
    end: int
    ends_file: bool

    def tokens(self, tokenizer: Tokenizer, field: str) -> list[int]:
        """The token ids of the chunk. A document ends with the end-of-text token: a text file is one document, each
        line of a JSONL file is one."""
        end = [] if tokenizer.eos is None else [tokenizer.eos]
        with Path(self.path).open("rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        if not is_json_lines(self.path):
            ids = tokenizer.encode(_decode(data, self.path, self.start)) + (end if self.ends_file else [])
        else:
            ids = []
            offset = self.start
            for line in data.splitlines(keepends=True):
                if line.strip():
                    ids += tokenizer.encode(read_text_field(line, field, self.path, offset)) + end
                offset += len(line)
        return _check_ids(ids, tokenizer)


def is_json_lines(path: str) -> bool:
    """Whether each line of a file is a JSON object, by the ending of its name."""
    return path.endswith(_JSON_LINES)


def find_files(files: Files) -> list[str]:
    """The paths that `files` names, patterns expanded, in order. Raises JobError if there is none."""
    given = [files] if isinstance(files, str | PathLike) else list(files)
    found: list[str] = []
    for each in (fspath(path) for path in given):
        matches = _expand(each)
        found += [path for path in matches if Path(path).is_file()]
        if not any(Path(path).is_file() for path in matches):
            if Path(each).is_dir():
                raise JobError(f"the data file {each!r} is a folder: name its files, as in {f'{each}/*.txt'!r}")
            raise JobError(f"the data file {each!r} does not exist on this machine: give a path or a pattern")
    if not found:
        raise JobError("no data file is given: pass a path, or a pattern such as 'books/*.txt'")
    return found


def _expand(pattern: str) -> list[str]:
    """The paths that match a pattern, sorted; a path without wildcards is itself."""
    if not glob.has_magic(pattern):
        return [pattern]
    fixed = next(n for n, part in enumerate(Path(pattern).parts) if glob.has_magic(part))
    root, rest = Path(*Path(pattern).parts[:fixed]), Path(*Path(pattern).parts[fixed:])
    return sorted(str(path) for path in root.glob(str(rest)))


def split_into_chunks(files: Files) -> Iterator[TextChunk]:
    """The chunks of all files, in order."""
    for path in find_files(files):
        size, start = Path(path).stat().st_size, 0
        with Path(path).open("rb") as file:
            while start < size:
                file.seek(min(start + CHUNK_BYTES, size))
                if file.tell() < size:
                    file.readline()
                end = file.tell()
                yield TextChunk(path, start, end, end >= size)
                start = end


def read_text_field(line: bytes, field: str, path: str, offset: int) -> str:
    """The text in one field of a JSON line. Raises JobError, which names the place, if it is not there."""
    record = parse_json_line(line, path, offset)
    text = record.get(field)
    if not isinstance(text, str):
        known = ", ".join(map(str, record)) or "none"
        place = f"line {_line_number(path, offset)} of {path}"
        raise JobError(f"{place} has no text in the field {field!r}: name another of its fields ({known})")
    return text


def parse_json_line(line: bytes, path: str, offset: int) -> dict[str, Any]:
    """The JSON object of a line. Raises JobError, which names the place, for anything else."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise JobError(f"line {_line_number(path, offset)} of {path} is not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise JobError(
            f"line {_line_number(path, offset)} of {path} is a {type(record).__name__}: each line must be a JSON object"
        )
    return record


def _line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at this byte. Reads the file up to there."""
    number = 1
    with Path(path).open("rb") as file:
        while block := file.read(min(offset, CHUNK_BYTES)):
            number, offset = number + block.count(b"\n"), offset - len(block)
    return number


def _decode(data: bytes, path: str, start: int) -> str:
    """The text of bytes that begin at byte `start` of a file."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        place = f"{error.reason} at byte {start + error.start}"
        raise JobError(f"{path} is not UTF-8 ({place}): convert it first") from None


def _check_ids(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    if ids and (min(ids) < 0 or (tokenizer.vocab is not None and max(ids) >= tokenizer.vocab)):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise JobError(f"the tokenizer returned the id {wrong}, though it has {tokenizer.vocab} ids: fix the tokenizer")
    return ids
