"""Time the five commands of docs/launch.md, from `pip install` to a run on three hosts with a real sshd each:

    python -m tests.machines.newcomer_path [WHEEL OR SOURCE FOLDER | installed]

`installed` leaves the first command out and uses the culm beside this Python.

The hosts are network namespaces of this machine and share its disk: culm is installed once, as all machines would do at
the same time. Needs root, iproute2 and OpenSSH.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.machines.ssh_lab import SshLab, ssh_lab, why_not

ROOT = Path(__file__).parents[2]
INSTALLED = "installed"
_LIMIT_S = 600.0
_POLL_S = 0.05


class NewcomerPath:
    """The commands of somebody who has a job file and three hosts."""

    def __init__(self, hosts: SshLab, folder: Path, source: str) -> None:
        self._hosts, self._folder, self._source = hosts, folder, source
        here = Path(sys.executable).parent if source == INSTALLED else folder / "venv" / "bin"
        self._culm = str(here / "culm")
        self._steps = folder / "run" / "steps.jsonl"
        self.times: list[tuple[str, float]] = []

    def time(self, what: str, act: Callable[[], object]) -> None:
        began = time.monotonic()
        act()
        self.times.append((what, time.monotonic() - began))
        print(f"{self.times[-1][1]:8.1f} s  {what}", flush=True)

    def install(self) -> None:
        venv = self._folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        subprocess.run([str(venv / "bin" / "pip"), "install", "--quiet", self._source], check=True)

    def culm(self, *arguments: str) -> None:
        subprocess.run(self._command(*arguments), env=self._environment, check=True, stdout=subprocess.DEVNULL)

    def launch(self, *more: str) -> None:
        ssh = f"ssh={self._hosts.ssh}"
        options = ["--on", "hosts", "--hosts", ",".join(self._hosts.addresses()), "--option", ssh, "--nodes", "3"]
        options += ["--program", self._culm, "--address", self._hosts.network.address("laptop")]
        self.culm("launch", str(ROOT / "examples" / "gpt.py"), *options, *more)

    def start(self) -> None:
        self.launch("--out", str(self._folder / "run"), "--detach")

    def wait_for_first_step(self) -> None:
        until = time.monotonic() + _LIMIT_S
        while not (self._steps.exists() and self._steps.read_bytes()):
            assert time.monotonic() < until, "there was no step"
            time.sleep(_POLL_S)

    def attach(self) -> None:
        """Until the window shows a step."""
        with subprocess.Popen(
            self._command("attach", "gpt"), env=self._environment, text=True, stdout=subprocess.PIPE
        ) as window:
            assert window.stdout is not None
            for line in window.stdout:
                if "steps 1/" in line:
                    break
            window.kill()

    def _command(self, *arguments: str) -> list[str]:
        return self._hosts.network.command("laptop", self._culm, *arguments)

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "CULM_HOME": str(self._folder / "home"), "XDG_CACHE_HOME": str(self._folder / "cache")}


def main() -> None:
    if why_not():
        raise SystemExit(why_not())
    source = sys.argv[1] if len(sys.argv) > 1 else str(ROOT)
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}")
    with tempfile.TemporaryDirectory(prefix="culm-newcomer-") as folder, ssh_lab(Path(folder), "a", "b", "c") as hosts:
        path = NewcomerPath(hosts, Path(folder), source)
        if source != INSTALLED:
            path.time("1. pip install culm", path.install)
        path.time("2. culm launch --dry-run", lambda: path.launch("--dry-run"))
        path.time("3. culm launch --detach", path.start)
        try:
            path.time("   ... until the first step of three hosts", path.wait_for_first_step)
            path.time("4. culm attach, until it shows the steps", path.attach)
        finally:
            path.time("5. culm down", lambda: path.culm("down", "gpt"))
        print(f"{sum(seconds for _, seconds in path.times):8.1f} s  together")


if __name__ == "__main__":
    main()
