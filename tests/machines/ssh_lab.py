"""Hosts with a real sshd each, in network namespaces of this machine. Needs root, iproute2 and OpenSSH."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.network_namespaces import Lab, lab, possible

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
_START_TIMEOUT_S = 20.0


def why_not() -> str:
    """Why this machine cannot have such hosts; empty: it can."""
    missing = [name for name in ("ssh", "ssh-keygen", SSHD) if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing: apt-get install openssh-server"
    return "" if possible() else "network namespaces cannot be made here"


class SshLab:
    """Hosts around a switch, and a host from which they are reached."""

    def __init__(self, network: Lab, folder: Path, names: list[str]) -> None:
        self.network, self._folder, self.names = network, folder, names
        self.key = folder / "key"
        self._servers: list[subprocess.Popen[bytes]] = []

    @property
    def ssh(self) -> str:
        """The ssh command of a user of these hosts."""
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "IdentitiesOnly=yes")
        quick = ("ConnectTimeout=2", "ServerAliveInterval=1", "ServerAliveCountMax=2")
        return " ".join(["ssh", "-F", "none", "-i", str(self.key), *(f"-o {each}" for each in (*options, *quick))])

    def addresses(self) -> list[str]:
        return [self.network.address(name) for name in self.names]

    def home(self, name: str) -> Path:
        """The home folder that programs on a host see."""
        return self._folder / f"home-{name}"

    def start(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # OpenSSH refuses to start without it
        for key in (self.key, self._folder / "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        for name in self.names:
            self.home(name).mkdir()
            self._servers.append(self._start_server(name))
        for name in self.names:
            self._wait_until_serving(name)

    def _start_server(self, name: str) -> subprocess.Popen[bytes]:
        config = self._folder / f"sshd-{name}.conf"
        config.write_text(
            f"HostKey {self._folder / 'host_key'}\nAuthorizedKeysFile {self.key}.pub\nStrictModes no\nUsePAM no\n"
            f"PidFile none\nPasswordAuthentication no\nPermitRootLogin yes\n"
            f"SetEnv HOME={self.home(name)} XDG_CACHE_HOME={self._folder / 'cache'}\n"
        )
        command = self.network.command(name, SSHD, "-D", "-e", "-f", str(config), "-p", "22")
        with (self._folder / f"sshd-{name}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_until_serving(self, name: str) -> None:
        until = time.monotonic() + _START_TIMEOUT_S
        while "listening on" not in (log := (self._folder / f"sshd-{name}.log").read_text()):
            assert time.monotonic() < until, log
            time.sleep(0.02)

    def stop(self) -> None:
        for server in self._servers:
            server.kill()
            server.wait()


@contextlib.contextmanager
def ssh_lab(folder: Path, *names: str) -> Iterator[SshLab]:
    """Hosts of these names with an sshd each, and a host `laptop` without one."""
    assert os.geteuid() == 0
    with lab("laptop", *names) as network:
        made = SshLab(network, folder, list(names))
        try:
            made.start()
            yield made
        finally:
            made.stop()
