"""The run folder: steps.jsonl, events.jsonl, trace.json and summary.json, on a path or URL."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import fsspec
import msgspec

from culm.errors import RunError, UsageError, said

if TYPE_CHECKING:
    from culm.checkpoint import Storage


_LOCK = "@hhqqi"
"""`struct flock` of Linux: to ask for a lock's holder is not to take it."""


class RunFolder:
    """Where a run leaves its files. On a local path lines appear as they happen, on a URL with every `sync`.

    While a process has the lines open it holds a lock on them, which ends with it: so others see whether a run without
    an end goes on.

    `resumed_at` says that the run goes on from a checkpoint with that many steps: what the folder has is kept, but for
    the lines of steps that will be run again, so that each step stands there once.
    """

    def __init__(self, out: str | None, *, resumed_at: int | None = None) -> None:
        self.out = out
        self._resumed_at = resumed_at
        self._lines: dict[str, TextIO] = {}
        self._unsynced = False
        self._broken = False
        """A write failed and was reported: from then on lines are dropped, so that the report itself gets through."""

    @property
    def checkpoints(self) -> str | None:
        """Where checkpoints go."""
        return None if self.out is None else f"{self.out.rstrip('/')}/checkpoints"

    @property
    def behind(self) -> bool:
        """Whether a URL lacks lines."""
        return self._unsynced and self.out is not None and local(self.out) is None

    @cached_property
    def _storage(self) -> Storage:
        from culm.checkpoint import Storage  # here, because it brings torch along, which launchers do without

        assert self.out is not None
        return Storage(self.out)

    def open(self) -> None:
        """Begin the files of lines. Raises RunError if the folder can not be written."""
        for name in ("steps.jsonl", "events.jsonl") if self.out is not None else ():
            with self._explained(name):
                self._lines[name] = self._begun(name)

    def _begun(self, name: str) -> TextIO:
        kept = "".join(self._kept(name))
        path = self._storage.local_path(name)
        if path is None:
            file: TextIO = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 until the run ends
            file.write(kept)
            return file
        self._storage.write(name, kept.encode())
        file = path.open("a", encoding="utf-8")
        with contextlib.suppress(OSError):  # not every file system can
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def _kept(self, name: str) -> Iterator[str]:
        """Lines of the part before. One that was cut off when its writer died is none."""
        if self._resumed_at is None or not self._storage.exists(name):
            return
        for line in self._storage.read(name).decode(errors="replace").splitlines():
            try:
                fields = json.loads(line)
            except ValueError:
                continue
            if name != "steps.jsonl" or fields["step"] < self._resumed_at:
                yield f"{line}\n"

    def step(self, **fields: Any) -> None:
        self._line("steps.jsonl", fields)

    def event(self, **fields: Any) -> None:
        self._line("events.jsonl", fields)

    def _line(self, name: str, fields: Mapping[str, Any]) -> None:
        file = self._lines.get(name)
        if file is None or self._broken:
            return
        with self._explained(name):
            file.write(json.dumps(plain(fields), allow_nan=False) + "\n")
            file.flush()
            self._unsynced = True

    def rewind(self, step: int) -> None:
        """The run goes back to a checkpoint: lines of the steps that are run again go."""
        if self._lines:
            self.close()
            self._resumed_at = step
            self.open()

    def write(self, name: str, value: Any) -> None:
        """A JSON file, whole or not at all. Raises RunError if that fails."""
        if self.out is None:
            return
        if name == "trace.json":  # too large for the encoder that writes in lines
            data = msgspec.json.encode(value)
        else:
            data = json.dumps(plain(value), allow_nan=False, indent=2).encode()
        with self._explained(name):
            self._storage.write(name, data + b"\n")

    def sync(self) -> None:
        """Put the lines where they belong, if that is a URL. Raises RunError if that fails."""
        self._unsynced = False
        for name, file in self._lines.items():
            if self._storage.local_path(name) is None:
                file.seek(0)
                with self._explained(name):
                    self._storage.write(name, file.read().encode())

    def close(self, *, sync: bool = True) -> None:
        """The end, however it came: a run that failed has nobody to complain to. Without `sync` a URL is left alone."""
        with contextlib.suppress(RunError):
            if sync:
                self.sync()
        for file in self._lines.values():
            with contextlib.suppress(OSError):
                file.close()
        self._lines.clear()

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except (OSError, RunError) as error:
            self._broken = True
            if isinstance(error, RunError):
                raise
            raise RunError(f"{self.out}/{name} can not be written: {error.strerror or error}") from None


def plain(value: Any) -> Any:
    """JSON has no NaN: readers in other languages would choke on it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def local(out: str) -> Path | None:
    """The path of a local folder; None for a URL."""
    if "://" in out and not out.startswith("file://"):
        return None
    return Path(out.removeprefix("file://")).expanduser()  # as fsspec does, which checkpoints are written by


def vacant(out: str, *, resumable: bool = True) -> None:
    """Refuse a folder that something lies in already: a run never mixes with another."""
    path, otherwise = local(out), f", or continue it with --resume {out}" if resumable else ""
    if path is None:
        _vacant_url(out, otherwise)
        return
    if path.is_file():
        raise UsageError(f"--out {out!r} is a file: give a folder that does not exist yet")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"--out {out!r} exists and is not empty: give another folder{otherwise}")


def _vacant_url(out: str, otherwise: str) -> None:
    if out.startswith("memory://"):
        raise UsageError(f"--out {out!r} lies in the memory of one process: give a place that all nodes can reach")
    try:
        files, root = fsspec.core.url_to_fs(out)
        taken = files.exists(root) and files.ls(root)
    except Exception as error:  # drivers raise what they like
        raise UsageError(f"--out {out!r} can not be opened: {type(error).__name__}: {error}") from None
    if taken:
        raise UsageError(f"--out {out!r} is not empty: give another place{otherwise}")


def claim(out: str, *, resumable: bool = True) -> None:
    """Make the folder, once nothing else can be refused any more."""
    vacant(out, resumable=resumable)
    path = local(out)
    if path is None:
        _claim_url(out)
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out!r} can not be made: {error.strerror}") from None


def _claim_url(out: str) -> None:
    """The first file of the run, empty yet: that nothing can be written there is better known before than after it."""
    try:
        files, root = fsspec.core.url_to_fs(out)
        files.makedirs(root, exist_ok=True)
        files.pipe_file(f"{root.rstrip('/')}/steps.jsonl", b"")
    except Exception as error:  # drivers raise what they like
        raise UsageError(f"--out {out!r} can not be written: {type(error).__name__}{said(error)}") from None


def written_to(path: Path) -> bool | None:
    """Whether another process of this machine has lines of a run open; None: nobody can say."""
    try:
        with path.open("rb") as file:
            asked = struct.pack(_LOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            return bool(struct.unpack(_LOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
    except OSError:
        return None


def saved(out: str) -> list[int]:
    """The steps that have a committed checkpoint, oldest first, by the names of the files alone; none if the place can
    not be asked."""
    try:
        files, root = fsspec.core.url_to_fs(out)
        folders = [str(path).rstrip("/") for path in files.ls(f"{root.rstrip('/')}/checkpoints", detail=False)]
        found = [folder for folder in folders if files.exists(f"{folder}/manifest.json")]
    except Exception:  # drivers raise what they like
        return []
    names = [folder.rpartition("/")[2].removeprefix("step-") for folder in found]
    return sorted(int(name) for name in names if name.isdigit())


def perfetto(spans: Mapping[int, Sequence[tuple[int, str, float, float]]], labels: Mapping[int, str]) -> dict[str, Any]:
    """The last actions of every node as a Chrome trace: open it in ui.perfetto.dev."""
    zero = min((s[2] for rows in spans.values() for s in rows), default=0.0)
    events: list[dict[str, Any]] = []
    for node, rows in spans.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": node, "args": {"name": labels.get(node, "")}})
        for step, action, start, end in rows:
            kind = action.lstrip("0123456789")[:1]
            events.append(
                {
                    "ph": "X",
                    "name": action,
                    "cat": kind,
                    "pid": 0,
                    "tid": node,
                    "ts": (start - zero) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"step": step},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
