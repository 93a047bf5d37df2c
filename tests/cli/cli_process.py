"""The command as users start it, and the processes below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

JOBS = str(Path(__file__).with_name("jobs.py"))
CULM = str(Path(sys.executable).with_name("culm"))
LIMIT_S = 180


def culm(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run([CULM, *arguments], capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd, check=False)


def one_sentence(stderr: str) -> str:
    """What was said on stderr, which must be one line from culm and no trace."""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("culm: ")
    return lines[0]


def children(pid: int) -> list[int]:
    """Processes that a process has started, oldest first."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def descendants(pid: int) -> list[int]:
    """All processes that came out of one."""
    return [found for child in children(pid) for found in (child, *descendants(child))]


def alive(pid: int) -> bool:
    """Running: neither gone nor a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class EndlessRun:
    """An endless run on two nodes, in its first steps."""

    def __init__(self, *options: str, job: str = f"{JOBS}:endless") -> None:
        self.process = subprocess.Popen(
            [CULM, "run", job, "--stages", "2", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.supervisor_pid, self.fork_server_pid, self.etcd_pid, self.all_pids = 0, 0, 0, list[int]()

    def next_line(self, start: str, part: str = "") -> str:
        """The next line on stdout that begins so, and has that in it; empty: the command has ended."""
        assert self.process.stdout is not None
        found = (line for line in self.process.stdout if line.startswith(start) and part in line)
        return next(found, "").rstrip("\n")

    def wait_for_steps(self) -> None:
        assert self.next_line("steps ")
        (self.supervisor_pid,) = children(self.process.pid)
        self.fork_server_pid, self.etcd_pid = sorted(
            children(self.supervisor_pid), key=lambda pid: "--data-dir" in _command(pid)
        )
        self.all_pids = [self.process.pid, *descendants(self.process.pid)]

    @property
    def agents(self) -> list[int]:
        return children(self.fork_server_pid)

    def signal_and_wait(self, pid: int, number: signal.Signals = signal.SIGKILL) -> tuple[int, str]:
        """Send a signal to a process; the exit code of the command, and what it said on stderr."""
        os.kill(pid, number)
        _, stderr = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, stderr

    def still_running(self, within_s: float = 10.0) -> list[int]:
        """Who is still running, at the latest after a while."""
        until = time.monotonic() + within_s
        while (found := [pid for pid in self.all_pids if alive(pid)]) and time.monotonic() < until:
            time.sleep(0.02)
        return found

    def clean_up(self) -> None:
        for pid in self.all_pids or [self.process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=LIMIT_S)
