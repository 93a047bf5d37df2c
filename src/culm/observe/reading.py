"""The files of a run, read: whole or cut off, complete or still growing, on a path or URL. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import fsspec
import msgspec

from culm.errors import UsageError
from culm.observe.folder import local, written_to

T = TypeVar("T")
Figure = float | str | None
"""A number; "nan" and the like as text, since JSON has no such numbers."""
FILES = ("summary.json", "steps.jsonl", "events.jsonl", "trace.json")


class Step(msgspec.Struct):
    """A line of steps.jsonl."""

    step: int
    t: float = 0.0
    loss: Figure = None
    samples: int = 0
    norm: Figure = None
    eval_loss: Figure = None


class Span(msgspec.Struct):
    """An event of trace.json: an action (ph is X), or the name of a node (ph is M)."""

    ph: str
    name: str = ""
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class Trace(msgspec.Struct):
    """The last actions of every node."""

    traceEvents: list[Span] = []  # noqa: N815 the name is Chrome's


@dataclass
class Contents:
    """What is known of a run, wherever it comes from: files, the store, or the process that leads it."""

    name: str = ""
    """How people call it: its folder, or its job."""
    summary: Mapping[str, Any] | None = None
    steps: Sequence[Step] = ()
    events: Sequence[Mapping[str, Any]] = ()
    trace: Trace | None = None
    quiet_s: float | None = None
    """Seconds since anything was written; None: nobody can say."""
    held: bool | None = None
    """Whether a process of this machine is writing the files; None: nobody can say."""
    live: bool = False
    """It is told by the run itself, which therefore goes on."""
    damaged: int = 0
    """Lines that could not be read, but for a last one that was being written."""
    now: Mapping[str, Any] = field(default_factory=dict)
    """What holds at the moment, beyond events: who leads, which post has which layers."""


class Folder:
    """The folder of a run. Each `look` reads what has come since the one before.

    UsageError: there is no such folder, or it is none of a run.
    """

    def __init__(self, place: str, *, empty: bool = False) -> None:
        """`empty`: a run may be about to begin there."""
        self.place = place.rstrip("/") or place
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.place)
            names = {str(found).rstrip("/").rpartition("/")[2] for found in self._files.ls(self._root, detail=False)}
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"there is no folder {place!r}: give the one that culm run --out was given") from None
        except Exception as error:  # drivers raise what they like
            raise UsageError(f"{place!r} can not be opened: {type(error).__name__}: {error}") from None
        if not names & set(FILES) and not (empty and not names):
            raise UsageError(
                f"{place!r} is not the folder of a run: it has none of {', '.join(FILES)}; give the one that culm run "
                "--out was given"
            )
        self._steps = _Lines(self._files, f"{self._root}/steps.jsonl", msgspec.json.Decoder(Step).decode)
        self._events = _Lines(self._files, f"{self._root}/events.jsonl", _event)
        self._summary = _Whole(self._files, f"{self._root}/summary.json", _summary)
        self._trace = _Whole(self._files, f"{self._root}/trace.json", msgspec.json.Decoder(Trace).decode)

    def look(self) -> Contents:
        """What is there now."""
        parts = (self._steps, self._events, self._summary, self._trace)
        for part in parts:
            part.look()
        written = [part.written for part in parts if part.written is not None]
        return Contents(
            name=str(self._root).rstrip("/").rpartition("/")[2] or self.place,
            summary=self._summary.value,
            steps=self._steps.values,
            events=self._events.values,
            trace=self._trace.value,
            quiet_s=max(0.0, time.time() - max(written)) if written else None,
            held=self._held(),
            damaged=self._steps.damaged + self._events.damaged,
        )

    def _held(self) -> bool | None:
        path = local(self.place)
        return None if path is None else written_to(path / "events.jsonl")


def _event(line: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(line)
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise msgspec.ValidationError("an event has a kind")
    found["t"] = found["t"] if isinstance(found.get("t"), (int, float)) else 0.0
    return found


def _summary(data: bytes) -> dict[str, Any]:
    return msgspec.json.decode(data, type=dict[str, Any])


class _File:
    """One file: whether it has changed, and when."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        self._seen: object = None
        self._inode: object = None
        self.written: float | None = None
        """When, as far as the storage says."""

    def _changed(self) -> Mapping[str, Any] | None:
        """What the storage says of the file, if that is not what it said before."""
        try:
            self._files.invalidate_cache()
            found: dict[str, Any] = self._files.info(self._path)
        except OSError:
            return None
        marks = [found.get(name) for name in ("size", "ino", "mtime", "ETag", "etag", "LastModified", "updated")]
        if marks == self._seen:
            return None
        self._seen = marks
        self.written = found["mtime"] if isinstance(found.get("mtime"), float) else None
        return found


class _Whole(_File, Generic[T]):
    """A JSON file, written at once. What can not be read is as good as not there."""

    def __init__(self, files: Any, path: str, decode: Callable[[bytes], T]) -> None:
        super().__init__(files, path)
        self._decode = decode
        self.value: T | None = None

    def look(self) -> None:
        if self._changed() is None:
            return
        try:
            self.value = self._decode(self._files.cat_file(self._path))
        except (OSError, msgspec.DecodeError, UnicodeError):
            self.value = None


class _Lines(_File, Generic[T]):
    """A file of lines that grows, and is begun anew when a run goes back to a checkpoint."""

    def __init__(self, files: Any, path: str, decode: Callable[[bytes], T]) -> None:
        super().__init__(files, path)
        self._decode = decode
        self._read: list[T] = []
        self._rest = b""
        """A line that has no end yet."""
        self._offset = 0
        self.values: Sequence[T] = self._read
        self.damaged = 0

    def look(self) -> None:
        found = self._changed()
        if found is None:
            return
        if found.get("ino") is None or found["ino"] != self._inode or found["size"] < self._offset:
            self._inode, self._offset, self._rest, self.damaged = found.get("ino"), 0, b"", 0
            self._read = []
        try:
            with self._files.open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        self.values = self._read
        if self._rest.strip():  # cut off, or complete but for its end: that is seen when it is read
            whole = self._decoded(self._rest)
            self.values = self._read if whole is None else [*self._read, whole]

    def _take(self, line: bytes) -> None:
        if line.strip():
            found = self._decoded(line)
            if found is None:
                self.damaged += 1
            else:
                self._read.append(found)

    def _decoded(self, line: bytes) -> T | None:
        try:
            return self._decode(line)
        except (msgspec.DecodeError, UnicodeError):
            return None
