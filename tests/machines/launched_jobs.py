"""Jobs that are launched on real engines: they train slowly until they are told to hurry, and end at a known step."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from culm.job import load_job
from culm.testing import reference

LIMIT_S = 120.0
STEPS = 600
JOB = """
import os, time, torch
from culm import Job
from torch import nn

DATA = [(torch.randn(4, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(32)]

class Nap(nn.Linear):
    def forward(self, x):
        if not os.path.exists({hurry!r}):
            time.sleep(0.04)
        return super().forward(x)

def job():
    return Job(
        layers=[lambda: Nap(4, 4)] * 2, loss=nn.functional.mse_loss, data=DATA, global_batch=4, micro_batch=2,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), steps={steps}, exact=True,
    )
"""


class LaunchedJob:
    """`culm launch` of such a job, as a process."""

    def __init__(self, folder: Path, arguments: Sequence[str], prefix: Sequence[str] = ()) -> None:
        """`prefix`: what starts the command, as in `ip netns exec NAME`."""
        self.folder = folder
        self.hurry_file = folder / "hurry"
        self.home = folder / "home"
        self.environment = {**os.environ, "CULM_HOME": str(self.home), "XDG_CACHE_HOME": str(folder / "cache")}
        self.name = f"nap-{uuid.uuid4().hex[:8]}"  # processes are found by it, also beside other launches
        (folder / "job").mkdir()
        self.file = folder / "job" / f"{self.name}.py"
        self.file.write_text(JOB.format(hurry=str(self.hurry_file), steps=STEPS))
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._prefix = prefix
        self.process = self._start("launch", str(self.file), "--json", "--out", str(folder / "run"), *arguments)
        self._reader = threading.Thread(target=self._read_lines)
        self._reader.start()

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "culm", *arguments],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def culm(self, *arguments: str, code: int = 0) -> str:
        """The output of another command beside it, which ends with this exit code."""
        process = self._start(*arguments)
        output = process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == code, output
        return output

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()

    def wait_for(self, text: str, *, after: int = 0) -> str:
        """The first line with this text, of those after the first `after` lines."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: next((line for line in self.lines[after:] if text in line), None), LIMIT_S
            )
        assert found, f"no {text!r} in {self.output}"
        return found

    def wait_for_steps(self, more: int) -> None:
        """Wait until more steps were committed."""
        until, wanted = time.monotonic() + LIMIT_S, self.steps + more
        while self.steps < wanted:
            assert time.monotonic() < until, self.output
            time.sleep(0.05)

    def wait_for_event(self, kind: str, **fields: object) -> dict[str, Any]:
        """Wait for an event in the run folder."""
        until, path = time.monotonic() + LIMIT_S, self.folder / "run" / "events.jsonl"
        while True:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            events: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
            for event in events:
                if event["kind"] == kind and fields.items() <= event.items():
                    return event
            assert time.monotonic() < until, f"no {kind} {fields} in {events}"
            time.sleep(0.05)

    @property
    def steps(self) -> int:
        try:
            return len((self.folder / "run" / "steps.jsonl").read_bytes().splitlines())
        except FileNotFoundError:
            return 0

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def finish(self) -> dict[str, Any]:
        """Let it hurry, and return its summary."""
        self.hurry_file.touch()
        assert self.process.wait(LIMIT_S) == 0, self.output
        self._reader.join()
        found: dict[str, Any] = json.loads(self.lines[-1])
        return found

    def expected_sha256(self) -> str:
        """The digest of the state that a failure-free run has at the end."""
        return reference(load_job(str(self.file), {})).state_sha256

    def processes(self) -> list[str]:
        """The command lines of all its agents, workers and supervisors on this machine."""
        titles = tuple(f"culm {role} {self.name}" for role in ("agent", "worker", "supervisor"))
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_text().replace("\0", " ").strip()
                    if line.startswith(titles):
                        found.append(line)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


@contextlib.contextmanager
def launched_job(folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> Iterator[LaunchedJob]:
    """A launched job; afterwards its command has ended."""
    launched = LaunchedJob(folder, arguments, prefix)
    try:
        yield launched
    finally:
        launched.close()


def processes_in(folder: Path) -> list[str]:
    """The command lines of all processes whose working folder is this one or below it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    found.append((entry / "cmdline").read_text().replace("\0", " ").strip())
    return found
