"""`--on local`: each machine is an agent process on this machine. It costs nothing.

PROVIDER FOLDER/machine-N/started.json    process id and the moment of its start
                          log             what its agent printed
                          notice          seconds that it had from SIGTERM on
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec

from culm.cluster.agent.preemption_notice import NOTICE_FILE_VARIABLE
from culm.errors import UsageError
from culm.machines.agent_process import describe_agent_end, log_end, write_private
from culm.machines.machine_provider import (
    MACHINE_VARIABLE,
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    ProviderSettings,
    no_notices,
)
from culm.providers.child_environment import environment_without_secrets

_KILL_TIMEOUT_S = 5.0


class StartedProcess(msgspec.Struct, frozen=True):
    """A process, so that it can be found again."""

    pid: int
    start_ticks: int
    """When it was started, in ticks since boot: process ids are used again."""
    started_at: float
    """Unix time."""


class LocalMachines:
    """Machines that are processes of this machine."""

    name: ClassVar[str] = "local"
    options: ClassVar[Mapping[str, str]] = {}
    costs_money: ClassVar[bool] = False

    def __init__(self, settings: ProviderSettings) -> None:
        self._folder = Path(settings.folder)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def check(self, request: MachineRequest) -> None:
        if request.instance or request.zone:
            field, value = ("instance", request.instance) if request.instance else ("zone", request.zone)
            raise UsageError(f"--{field} is {value!r}: machines of --on local have no {field}, omit it")

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        return f"# {request.count} times, with the token in the environment:\n{spec.agent_command_line(request)}\n"

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        return [self._start(spec, request) for _ in range(request.count)]

    def _start(self, spec: LaunchSpec, request: MachineRequest) -> str:
        numbers = [int(path.name.partition("-")[2]) for path in self._folder.glob("machine-*")]
        id_ = f"machine-{max(numbers, default=0) + 1}"
        folder = self._folder / id_
        folder.mkdir(mode=0o700)
        environment = {
            **environment_without_secrets(),
            **spec.environment,
            **spec.secret_environment,
            MACHINE_VARIABLE: id_,
        }
        environment[NOTICE_FILE_VARIABLE] = str(folder / "notice")
        with (folder / "log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    spec.agent_command(request),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise UsageError(f"--program is {spec.program[0]!r}: it cannot be run ({error.strerror})") from None
        self._children[id_] = process
        started = StartedProcess(process.pid, _start_ticks(process.pid) or 0, time.time())
        write_private(folder / "started.json", msgspec.json.encode(started).decode())
        return id_

    async def machines(self) -> list[Machine]:
        return [self._describe(id_, started) for id_, started in self._started().items()]

    def _describe(self, id_: str, started: StartedProcess) -> Machine:
        child = self._children.get(id_)
        status = None if child is None else child.poll()
        if _is_alive(started) and status is None:
            return Machine(id=id_, state="running", started_at=started.started_at, price_per_h=0.0)
        reason, failed = describe_agent_end(status, log_end(self._folder / id_ / "log"))
        return Machine(id=id_, state="ended", started_at=started.started_at, reason=reason, failed=failed)

    async def drain(self, ids: list[str], notice_s: float) -> None:
        for id_ in ids:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / id_ / "notice").write_text(f"{notice_s:g}")
        self._send(ids, signal.SIGTERM)

    async def release(self, ids: list[str]) -> None:
        """Its whole session: the agent may have started processes that outlive it for a moment."""
        self._send(ids, signal.SIGKILL, whole_session=True)

    def _send(self, ids: list[str], number: signal.Signals, *, whole_session: bool = False) -> None:
        started = self._started()
        for id_ in ids:
            if id_ in started and _is_alive(started[id_]):
                with contextlib.suppress(ProcessLookupError):
                    (os.killpg if whole_session else os.kill)(started[id_].pid, number)

    def notices(self) -> AsyncIterator[MachineNotice]:
        return no_notices()

    def price(self, request: MachineRequest) -> float | None:
        del request
        return 0.0

    async def down(self) -> None:
        started = self._started()
        self._send(list(started), signal.SIGKILL, whole_session=True)
        until = time.monotonic() + _KILL_TIMEOUT_S
        while any(_is_alive(process) for process in started.values()) and time.monotonic() < until:
            self._reap()
            await asyncio.sleep(0.02)
        self._reap()
        for folder in self._folder.glob("machine-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _reap(self) -> None:
        for process in self._children.values():
            process.poll()

    def _started(self) -> dict[str, StartedProcess]:
        """The processes of the launch, by machine, also those that an earlier launcher has started."""
        found = {}
        for path in sorted(self._folder.glob("machine-*/started.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                found[path.parent.name] = msgspec.json.decode(path.read_bytes(), type=StartedProcess)
        return found


def _is_alive(started: StartedProcess) -> bool:
    return _start_ticks(started.pid) == started.start_ticks


def _start_ticks(pid: int) -> int | None:
    """When a process was started; None: there is none, or it has ended and was not waited for."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(fields[18])
