"""The run folder: steps.jsonl, events.jsonl, trace.json and summary.json, on a path or URL."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import fsspec
import msgspec

from culm.errors import RunError, UsageError, message_suffix
from culm.storage_access import before_access

if TYPE_CHECKING:
    from culm.checkpoint import Storage
    from culm.observe.step_metrics import StepMetrics
    from culm.observe.writers.writer import RunInfo


_FLOCK_FORMAT = "@hhqqi"
"""`struct flock` of Linux, to ask whether a lock is held without taking it."""


_COPIED_BYTES = 1 << 18
"""Bytes of lines that are written at once when a file of lines is copied."""
LINE_FILES = ("steps.jsonl", "events.jsonl")
SHARED_PREFIX = ".shared-"
"""Begins the name of the file by which machines recognise the folder of their run (providers/shared_folder.py)."""


class RunFolder:
    """The writer of a run's files. Lines appear at once on a local path, and with every `sync` on a URL.

    While a process has the files of lines open it holds a lock on them, which the kernel releases when the process
    ends: readers can tell a run that goes on from one that was cut off.

    `resumed_at` means that the run continues from a checkpoint with that many steps: the folder's lines are kept,
    except for the steps that will be run again, so that each step is in steps.jsonl once.

    It has the methods of a `Writer`. Its methods raise RunError if a file cannot be written. Each of them can be
    called again after that: a part of a line that a failed call has written is removed first. A file of lines that was
    deleted is written again with all of its lines. A local folder that is gone may be on a disk that is not mounted at
    the moment: it is created again only while `creates` is true.
    """

    def __init__(self, out: str | None, *, resumed_at: int | None = None, creates: bool = True) -> None:
        """`creates`: whether `open` creates a folder that does not exist."""
        self.out = out
        self.creates = creates
        """Whether the next write creates a folder that does not exist. False once the files are open."""
        self._resumed_at = resumed_at
        self._line_files: dict[str, BinaryIO] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of whole lines by file."""
        self._unsynced = False
        self._damaged: set[str] = set()
        """Files in which the last write failed."""

    @property
    def checkpoints(self) -> str | None:
        """The folder of the checkpoints."""
        return None if self.out is None else f"{self.out.rstrip('/')}/checkpoints"

    @property
    def is_url(self) -> bool:
        """Whether the folder is not a path of this machine."""
        return self.out is not None and local_path(self.out) is None

    @property
    def is_open(self) -> bool:
        """Whether the files of lines are open."""
        return bool(self._line_files)

    @property
    def has_unsynced_lines(self) -> bool:
        """Whether lines have not been copied to a URL yet."""
        return self._unsynced and self.is_url

    @property
    def _storage(self) -> Storage:
        return self._creating_storage if self.creates else self._careful_storage

    @cached_property
    def _creating_storage(self) -> Storage:
        from culm.checkpoint import Storage  # it imports torch, which launchers do without

        assert self.out is not None
        return Storage(self.out)

    @cached_property
    def _careful_storage(self) -> Storage:
        from culm.checkpoint import Storage

        assert self.out is not None
        return Storage(self.out, existing=self.out)

    def open(self, run: RunInfo | None = None) -> None:  # noqa: ARG002 the contract of writers
        """Create or continue the files of lines. Raises RunError if the folder cannot be written."""
        for name in LINE_FILES if self.out is not None else ():
            if name not in self._line_files:
                with self._explain_errors(name):
                    self._open_line_file(name, self._saved_lines(name))
        self.creates = False

    def _open_line_file(self, name: str, lines: Iterable[bytes]) -> None:
        """Replace a file of lines and open it. The lines are copied one by one: a long run has gigabytes of them."""
        path = self._storage.local_path(name)
        if path is None:
            file: BinaryIO = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115 until the run ends
            size = _write_lines(file, lines)
        else:
            with self._storage.open_new(name) as new:
                size = _write_lines(new, lines)
            file = _open_lines(path)
            _lock(file)
        self._line_files[name], self._sizes[name] = file, size
        self._damaged.discard(name)

    def _saved_lines(self, name: str) -> Iterable[bytes]:
        """The lines in the folder of a resumed run that are kept."""
        if self._resumed_at is None or not self._storage.exists(name):
            return ()
        return _lines_before(name, self._storage.read_lines(name), self._resumed_at)

    def write_step(self, metrics: StepMetrics) -> None:
        self.append("steps.jsonl", encode_line(metrics.to_fields()))

    def write_event(self, event: Mapping[str, Any]) -> None:
        self.append("events.jsonl", encode_line(event))

    def append(self, name: str, lines: bytes) -> None:
        """Append whole lines to a file. Does nothing if the files are not open. Raises RunError if that fails."""
        if name not in self._line_files:
            return
        with self._explain_errors(name):
            if name in self._damaged or self._was_replaced(name):
                self._repair(name)
            self._damaged.add(name)
            if not self.is_url:
                before_access("write")
            _write_all(self._line_files[name], lines)
            self._sizes[name] += len(lines)
            self._damaged.discard(name)
            self._unsynced = True

    def _was_replaced(self, name: str) -> bool:
        """Whether the path of a file is not that of the open file any more: writes would be lost."""
        path = self._storage.local_path(name)
        if path is None:
            return False
        try:
            opened = os.fstat(self._line_files[name].fileno())
        except OSError:  # stale
            return True
        try:
            return not os.path.samestat(path.stat(), opened)
        except FileNotFoundError:
            return True

    def _repair(self, name: str) -> None:
        """Open a file anew, because its descriptor may be stale or its path that of another file. Remove a line that
        was written in part, and add lines that the file at the path does not have."""
        path, size = self._storage.local_path(name), self._sizes[name]
        if path is not None:
            if self.creates:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            former, file = self._line_files[name], _open_lines(path)
            try:
                found = file.seek(0, os.SEEK_END)
                _write_all(file, _read_open_file(former, found, size))
            except OSError:
                file.close()
                raise
            with contextlib.suppress(OSError):
                former.close()
            _lock(file)  # now: closing any descriptor of a file releases the locks of the process
            self._line_files[name] = file
        file = self._line_files[name]
        if file.seek(0, os.SEEK_END) > size:
            file.truncate(size)
        self._sizes[name] = file.seek(0, os.SEEK_END)

    def rewind(self, step: int) -> None:
        """Remove the lines of this step and later ones: they will be run again, from a checkpoint."""
        for name, file in list(self._line_files.items()):
            with self._explain_errors(name):
                if self._storage.local_path(name) is None:
                    with open(file.fileno(), "rb", closefd=False) as buffered:
                        buffered.seek(0)
                        self._open_line_file(name, _lines_before(name, buffered, step))
                else:
                    self._open_line_file(name, _lines_before(name, self._storage.read_lines(name), step))
                file.close()

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically. Raises RunError if that fails."""
        if self.out is None:
            return
        if name == "trace.json":  # large: msgspec is faster than json
            data = msgspec.json.encode(value)
        else:
            data = json.dumps(to_plain_json(value), allow_nan=False, indent=2).encode()
        with self._explain_errors(name):
            self._storage.write(name, data + b"\n")

    def sync(self) -> None:
        """Copy the lines to the folder if that is a URL. Raises RunError if that fails."""
        for name, file in self._line_files.items():
            if self._storage.local_path(name) is None:
                with self._explain_errors(name):
                    file.seek(0)
                    self._storage.write(name, file.read(self._sizes[name]))
        self._unsynced = False

    def close(self, summary: Mapping[str, Any] | None = None, *, sync: bool = True) -> None:  # noqa: ARG002
        """Close the files; errors are ignored, because the run has ended. `sync` False: do not copy lines to a URL.

        The summary is written before by `write_json`, whose errors are not ignored.
        """
        with contextlib.suppress(RunError):
            if sync:
                self.sync()
        for file in self._line_files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._line_files.clear()

    @contextlib.contextmanager
    def _explain_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"{self.out}/{name} cannot be written: {error.strerror or error}") from None


def encode_line(fields: Mapping[str, Any]) -> bytes:
    """Fields as a line of strict JSON."""
    return json.dumps(to_plain_json(fields), allow_nan=False).encode() + b"\n"


def _lines_before(name: str, lines: Iterable[bytes], step: int) -> Iterator[bytes]:
    """The lines of a file without those of this step and later ones. A last line that was cut off is dropped."""
    for data in lines:
        line = data.decode(errors="replace").rstrip("\r\n")
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if name != "steps.jsonl" or fields["step"] < step:
            yield f"{line}\n".encode()


def _open_lines(path: Path) -> BinaryIO:
    """Open a file for appending and reading."""
    return path.open("a+b", buffering=0)


def _lock(file: BinaryIO) -> None:
    """Lock a file if its file system has locks."""
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _read_open_file(file: BinaryIO, start: int, end: int) -> bytes:
    """The bytes of an open file between two positions; empty if it cannot be read any more."""
    data = b""
    with contextlib.suppress(OSError):
        while start + len(data) < end and (
            piece := os.pread(file.fileno(), end - start - len(data), start + len(data))
        ):
            data += piece
    return data


def _write_lines(file: BinaryIO, lines: Iterable[bytes]) -> int:
    """Write lines, many with one call. Returns the number of bytes."""
    waiting, size = bytearray(), 0
    for line in lines:
        waiting += line
        size += len(line)
        if len(waiting) >= _COPIED_BYTES:
            _write_all(file, waiting)
            waiting = bytearray()
    _write_all(file, waiting)
    return size


def _write_all(file: BinaryIO, data: bytes | bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def to_plain_json(value: Any) -> Any:
    """A value that strict JSON can hold: NaN and infinities become strings, keys become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): to_plain_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_json(v) for v in value]
    return value


def local_path(out: str) -> Path | None:
    """The path of a local folder; None for a URL."""
    if "://" in out and not out.startswith("file://"):
        return None
    return Path(out.removeprefix("file://")).expanduser()  # as fsspec does


def check_folder_empty(out: str, *, resumable: bool = True) -> None:
    """Raise UsageError if a folder is not empty: files of two runs must not mix."""
    path, otherwise = local_path(out), f", or continue it with --resume {out}" if resumable else ""
    if path is None:
        _check_url_empty(out, otherwise)
        return
    if path.is_file():
        raise UsageError(f"--out {out!r} is a file: give a folder that does not exist yet")
    if path.is_dir() and any(not entry.name.startswith(SHARED_PREFIX) for entry in path.iterdir()):
        raise UsageError(f"--out {out!r} exists and is not empty: give another folder{otherwise}")


def _check_url_empty(out: str, resume_hint: str) -> None:
    if out.startswith("memory://"):
        raise UsageError(f"--out {out!r} is in the memory of one process: give a place that all nodes can reach")
    try:
        files, root = fsspec.core.url_to_fs(out)
        contents = files.exists(root) and files.ls(root)
    except Exception as error:  # fsspec drivers raise errors of their own
        raise UsageError(f"--out {out!r} cannot be opened: {type(error).__name__}: {error}") from None
    if contents:
        raise UsageError(f"--out {out!r} is not empty: give another place{resume_hint}")


def create_run_folder(out: str, *, resumable: bool = True) -> None:
    """Create the folder of a run, for its owner only. Call it last, when nothing else can be refused any more.

    A folder that exists already keeps its permissions.
    """
    check_folder_empty(out, resumable=resumable)
    path = local_path(out)
    if path is None:
        _create_url(out)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out!r} cannot be created: {error.strerror}") from None


def _create_url(out: str) -> None:
    """Write an empty steps.jsonl, so that a URL that cannot be written is refused before the run starts."""
    try:
        files, root = fsspec.core.url_to_fs(out)
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root.rstrip('/')}/steps.jsonl", b"")
    except Exception as error:  # fsspec drivers raise errors of their own
        raise UsageError(f"--out {out!r} cannot be written: {type(error).__name__}{message_suffix(error)}") from None


def has_open_writer(path: Path) -> bool | None:
    """Whether another process of this machine has a file of lines open; None: unknown."""
    try:
        with path.open("rb") as file:
            lock = struct.pack(_FLOCK_FORMAT, fcntl.F_WRLCK, 0, 0, 0, 0)
            return bool(struct.unpack(_FLOCK_FORMAT, fcntl.fcntl(file, fcntl.F_GETLK, lock))[0] != fcntl.F_UNLCK)
    except OSError:
        return None


def saved_checkpoint_steps(out: str) -> list[int]:
    """The steps with a committed checkpoint by file names, oldest first; empty if the folder cannot be listed."""
    try:
        files, root = fsspec.core.url_to_fs(out)
        folders = [str(path).rstrip("/") for path in files.ls(f"{root.rstrip('/')}/checkpoints", detail=False)]
        found = [folder for folder in folders if files.exists(f"{folder}/manifest.json")]
    except Exception:  # fsspec drivers raise errors of their own
        return []
    names = [folder.rpartition("/")[2].removeprefix("step-") for folder in found]
    return sorted(int(name) for name in names if name.isdigit())


_COPY = "copy "
"""The beginning of the name of a span in which a GPU copied an output to the host, beside the next action."""
_COPY_LENGTH = len(_COPY)
_FIRST_COPY_THREAD = 1_000_000


def perfetto_trace(
    spans: Mapping[int, Sequence[tuple[int, str, float, float]]], labels: Mapping[int, str]
) -> dict[str, Any]:
    """The last actions of every worker as a Chrome trace: open it in ui.perfetto.dev."""
    zero = min((s[2] for rows in spans.values() for s in rows), default=0.0)
    events: list[dict[str, Any]] = []
    for worker, rows in spans.items():
        threads = {worker: labels.get(worker, "")}
        has_copies = _COPY in {action[:_COPY_LENGTH] for _, action, _, _ in rows}
        if has_copies:
            threads[_FIRST_COPY_THREAD + worker] = f"{labels.get(worker, '')} copies to the host"
        for thread, name in threads.items():
            events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": name}})
        for step, action, start, end in rows:
            is_copy = has_copies and action.startswith(_COPY)
            kind = "copy" if is_copy else action.lstrip("0123456789")[:1]
            events.append(
                {
                    "ph": "X",
                    "name": action,
                    "cat": kind,
                    "pid": 0,
                    "tid": _FIRST_COPY_THREAD + worker if is_copy else worker,
                    "ts": (start - zero) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"step": step},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
