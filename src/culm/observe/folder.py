"""The run folder: steps.jsonl, events.jsonl, trace.json and summary.json, on a path or URL."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import fsspec

from culm.errors import RunError, UsageError


class RunFolder:
    """Where a run leaves its files. On a local path lines appear as they happen; on a URL when the run pauses or ends."""

    def __init__(self, out: str | None, *, append: bool = False) -> None:
        self.out = out
        self._append = append
        self._files: dict[str, TextIO] = {}

    @property
    def checkpoints(self) -> str | None:
        """Where checkpoints go."""
        return None if self.out is None else f"{self.out.rstrip('/')}/checkpoints"

    def step(self, **fields: Any) -> None:
        self._line("steps.jsonl", fields)

    def event(self, **fields: Any) -> None:
        self._line("events.jsonl", fields)

    def _line(self, name: str, fields: Mapping[str, Any]) -> None:
        if self.out is None:
            return
        try:
            file = self._files.get(name) or self._open(name)
            file.write(json.dumps(_plain(fields)) + "\n")
            file.flush()
        except OSError as error:
            raise RunError(f"{self.out}/{name} can not be written: {error.strerror or error}") from None

    def _open(self, name: str) -> TextIO:
        assert self.out is not None
        if local(self.out) is None:
            self._files[name] = io.StringIO()
        else:
            path = Path(self.out) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[name] = path.open("a" if self._append else "w", encoding="utf-8")
        return self._files[name]

    def write(self, name: str, value: Any) -> None:
        """A JSON file, whole."""
        if self.out is None:
            return
        try:
            with fsspec.open(f"{self.out.rstrip('/')}/{name}", "w") as file:
                json.dump(_plain(value), file, indent=None if name == "trace.json" else 2)
                file.write("\n")
        except OSError as error:
            raise RunError(f"{self.out}/{name} can not be written: {error.strerror or error}") from None

    def close(self) -> None:
        """Put what is buffered where it belongs."""
        for name, file in self._files.items():
            if isinstance(file, io.StringIO):
                with fsspec.open(f"{self.out}/{name}", "w") as target:
                    target.write(file.getvalue())
            file.close()
        self._files.clear()


def _plain(value: Any) -> Any:
    """JSON has no NaN: readers in other languages would choke on it."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def local(out: str) -> Path | None:
    """The path of a local folder; None for a URL."""
    if "://" in out and not out.startswith("file://"):
        return None
    return Path(out.removeprefix("file://"))


def claim(out: str) -> None:
    """Refuse a folder that something lies in already: a run never mixes with another."""
    path = local(out)
    if path is None:
        return
    if path.is_file():
        raise UsageError(f"--out {out!r} is a file: give a folder that does not exist yet")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(
            f"--out {out!r} exists and is not empty: give another folder, or continue it with --resume {out}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out!r} can not be made: {error.strerror}") from None


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
