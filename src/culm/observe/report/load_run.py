"""Read the files of a run: complete, cut off or still growing, on a path or URL. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import fsspec
import msgspec

from culm.errors import UsageError
from culm.market.cost_record import CostRecord, decode_cost_record
from culm.observe.step_metrics import StepMetrics
from culm.observe.writers.run_folder import has_open_writer, local_path

T = TypeVar("T")
RUN_FILES = ("summary.json", "steps.jsonl", "events.jsonl", "trace.json")


class PerfettoEvent(msgspec.Struct):
    """An event of trace.json: an action (ph is X), or the name of a node (ph is M)."""

    ph: str
    name: str = ""
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}
    cat: str = ""


class PerfettoTrace(msgspec.Struct):
    """The last actions of every node."""

    traceEvents: list[PerfettoEvent] = []  # noqa: N815 the name is Chrome's


@dataclass
class RunContents:
    """What is known of a run: from its files, from the store, or from the process that leads it."""

    name: str = ""
    """The name of its folder or job."""
    summary: Mapping[str, Any] | None = None
    steps: Sequence[StepMetrics] = ()
    events: Sequence[Mapping[str, Any]] = ()
    trace: PerfettoTrace | None = None
    cost: CostRecord | None = None
    """What its nodes have cost until now, or until its end; None: no node had a price."""
    idle_s: float | None = None
    """Seconds since anything was written; None: unknown."""
    has_open_writer: bool | None = None
    """Whether a process of this machine has the files open for writing; None: unknown."""
    live: bool = False
    """Whether the contents come from the run itself, which therefore goes on."""
    damaged_lines: int = 0
    """Lines that could not be decoded, without a last line that is still being written."""
    current: Mapping[str, Any] = field(default_factory=dict)
    """The current state beyond events: the leader, and the layers of each slot."""


class RunFolderReader:
    """Reads the folder of a run. Each `read` adds what was written since the one before.

    Raises UsageError if there is no such folder, or if it is not the folder of a run.
    """

    def __init__(self, location: str, *, allow_empty: bool = False) -> None:
        """`allow_empty`: accept an empty folder, in which a run may be about to begin."""
        self.location = location.rstrip("/") or location
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.location)
            names = {str(found).rstrip("/").rpartition("/")[2] for found in self._files.ls(self._root, detail=False)}
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"there is no folder {location!r}: give the one that culm run --out was given") from None
        except Exception as error:  # fsspec drivers raise errors of their own
            raise UsageError(f"{location!r} cannot be opened: {type(error).__name__}: {error}") from None
        if not names & set(RUN_FILES) and not (allow_empty and not names):
            raise UsageError(
                f"{location!r} is not the folder of a run: it has none of {', '.join(RUN_FILES)}; give the one that "
                "culm run --out was given"
            )
        self._steps = _JsonLinesFile(self._files, f"{self._root}/steps.jsonl", _decode_step)
        self._events = _JsonLinesFile(self._files, f"{self._root}/events.jsonl", _decode_event)
        self._summary = _JsonFile(self._files, f"{self._root}/summary.json", _decode_summary)
        self._cost = _JsonFile(self._files, f"{self._root}/cost.json", decode_cost_record)
        self._trace = _JsonFile(self._files, f"{self._root}/trace.json", msgspec.json.Decoder(PerfettoTrace).decode)

    def read(self) -> RunContents:
        """The contents as of now."""
        parts = (self._steps, self._events, self._summary, self._trace, self._cost)
        for part in parts:
            part.read()
        writing = self._has_open_writer()
        written = [part.modified_at for part in parts if part.modified_at is not None]
        return RunContents(
            name=str(self._root).rstrip("/").rpartition("/")[2] or self.location,
            summary=self._summary.value,
            steps=self._steps.values,
            events=self._events.values,
            trace=self._trace.value,
            idle_s=max(0.0, time.time() - max(written)) if written else None,
            has_open_writer=writing,
            cost=self._read_cost(writing),
            damaged_lines=self._steps.damaged_lines + self._events.damaged_lines,
        )

    def _read_cost(self, writing: bool | None) -> CostRecord | None:
        """The nodes of a run that goes on are billed until now, those of a run that was cut off until its last line."""
        record = self._cost.value
        if record is None or record.ended:
            return record
        if writing:
            return record.accrued(time.time())
        return record.closed(record.started_at + self._last_line_s())

    def _last_line_s(self) -> float:
        """When the newest part of the run wrote its last line, in seconds since its start."""
        begins = [number for number, event in enumerate(self._events.values) if event["kind"] == "run_started"]
        events = self._events.values[begins[-1] :] if begins else self._events.values
        first_step = events[0].get("start", 0) if begins else 0
        last = [event["t"] for event in events[-1:]]
        last += [step.t for step in self._steps.values[-1:] if step.step >= first_step]
        return float(max(last, default=0.0))

    def _has_open_writer(self) -> bool | None:
        path = local_path(self.location)
        return None if path is None else has_open_writer(path / "events.jsonl")


def _decode_step(line: bytes) -> StepMetrics:
    return StepMetrics.from_fields(_decode_fields(line))


_decode_fields = msgspec.json.Decoder(dict[str, Any]).decode


def _decode_event(line: bytes) -> dict[str, Any]:
    found = msgspec.json.decode(line)
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise msgspec.ValidationError("an event has a kind")
    found["t"] = found["t"] if isinstance(found.get("t"), (int, float)) else 0.0
    return found


def _decode_summary(data: bytes) -> dict[str, Any]:
    return msgspec.json.decode(data, type=dict[str, Any])


class _WatchedFile:
    """A file that is read again when it has changed."""

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path
        self._last_fingerprint: object = None
        self._inode: object = None
        self.modified_at: float | None = None
        """When the file was last written; None: the storage does not say."""

    def _info_if_changed(self) -> Mapping[str, Any] | None:
        """The file's info if it differs from the last call's, else None."""
        try:
            self._files.invalidate_cache()
            found: dict[str, Any] = self._files.info(self._path)
        except OSError:
            return None
        marks = [found.get(name) for name in ("size", "ino", "mtime", "ETag", "etag", "LastModified", "updated")]
        if marks == self._last_fingerprint:
            return None
        self._last_fingerprint = marks
        self.modified_at = found["mtime"] if isinstance(found.get("mtime"), float) else None
        return found


class _JsonFile(_WatchedFile, Generic[T]):
    """A JSON file. Its value is None while it is missing or cannot be decoded."""

    def __init__(self, files: Any, path: str, decode: Callable[[bytes], T]) -> None:
        super().__init__(files, path)
        self._decode = decode
        self.value: T | None = None

    def read(self) -> None:
        if self._info_if_changed() is None:
            return
        try:
            self.value = self._decode(self._files.cat_file(self._path))
        except (OSError, msgspec.DecodeError, UnicodeError):
            self.value = None


class _JsonLinesFile(_WatchedFile, Generic[T]):
    """A file of lines that grows, and is replaced when a run goes back to a checkpoint."""

    def __init__(self, files: Any, path: str, decode: Callable[[bytes], T]) -> None:
        super().__init__(files, path)
        self._decode = decode
        self._complete_values: list[T] = []
        self._partial_line = b""
        """A last line without a newline."""
        self._offset = 0
        self.values: Sequence[T] = self._complete_values
        self.damaged_lines = 0

    def read(self) -> None:
        found = self._info_if_changed()
        if found is None:
            return
        if found.get("ino") is None or found["ino"] != self._inode or found["size"] < self._offset:
            self._inode, self._offset, self._partial_line, self.damaged_lines = found.get("ino"), 0, b"", 0
            self._complete_values = []
        try:
            with self._files.open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._add_line(line)
        self.values = self._complete_values
        if self._partial_line.strip():  # cut off, or complete except for its newline
            whole = self._try_decode(self._partial_line)
            self.values = self._complete_values if whole is None else [*self._complete_values, whole]

    def _add_line(self, line: bytes) -> None:
        if line.strip():
            found = self._try_decode(line)
            if found is None:
                self.damaged_lines += 1
            else:
                self._complete_values.append(found)

    def _try_decode(self, line: bytes) -> T | None:
        try:
            return self._decode(line)
        except (msgspec.DecodeError, UnicodeError):
            return None
