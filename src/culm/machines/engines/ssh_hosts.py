"""`--on hosts`: each machine is an agent process on a host that is reached with the system's ssh.

    HOST:~/.culm/machines/LAUNCH/MACHINE/pid      process id of the session of the agent
                                         agent    process id of the agent
                                         log      what it printed
                                         exit     its exit status, when it has ended
                                         notice   seconds that it had from SIGTERM on

The agent is a session of its own: it goes on when the connection ends. One ssh process per machine waits for its end. A
host that cannot be reached for a while counts as lost; when it is back, what is left there is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from culm.cluster.agent.preemption_notice import NOTICE_FILE_VARIABLE
from culm.errors import RunError, UsageError
from culm.machines.agent_process import describe_agent_end
from culm.machines.machine_provider import (
    MACHINE_VARIABLE,
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    MachineState,
    ProviderSettings,
    no_notices,
)
from culm.machines.ssh_command import SSH_FAILED, check_address, ssh_command

_LOST_AFTER_S = 10.0
_RETRY_S = 2.0
_COMMAND_TIMEOUT_S = 30.0
_BEGIN_MARK, _END_MARK = "culm-connected", "culm-agent-ended"
_MAX_CONNECTIONS = 16
"""Connections that are opened at the same time."""

_START = """\
set -u
umask 077
folder="$HOME/.culm/machines/{launch}/{machine}"
mkdir -p "$folder" || exit 70
{exports}
export {notice_file}="$folder/notice"
setsid sh -c '{command} & echo $! >"$0/agent"; wait $!; echo $? >"$0/exit"' "$folder" \\
    >"$folder/log" 2>&1 </dev/null &
echo $! >"$folder/pid"
unset {secrets}
wait $!
{report}"""
_FOLLOW = """\
folder="$HOME/.culm/machines/{launch}/{machine}"
while [ ! -e "$folder/exit" ] && kill -0 "$(cat "$folder/pid")" 2>/dev/null; do sleep 1; done
{report}"""
_REPORT = """\
echo {mark} "$(cat "$folder/exit" 2>/dev/null)"
tail -c 2000 "$folder/log"
"""
_COUNT_GPUS = "nvidia-smi -L 2>/dev/null | grep -c '^GPU '\n"
_SIGNAL = """\
for folder in {folders}; do
    pid=$(cat "$folder/{file}" 2>/dev/null) || continue
    grep -qsF "$folder" "/proc/$(cat "$folder/pid")/cmdline" || continue
    {before}
    kill -{signal} {group}"$pid" 2>/dev/null
done
{rest}"""
_REMOVE = """\
rm -rf "$HOME/.culm/machines/{launch}"
rmdir "$HOME/.culm/machines" "$HOME/.culm" 2>/dev/null
true
"""


class Host(NamedTuple):
    """A host of the list."""

    address: str
    """As ssh understands it: [USER@]HOST."""
    zone: str = ""


@dataclass
class HostMachine:
    """An agent on a host."""

    host: Host
    started_at: float
    state: MachineState = "pending"
    reason: str = ""
    failed: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class SshHosts:
    """Machines that are hosts of a list."""

    name: ClassVar[str] = "hosts"
    options: ClassVar[Mapping[str, str]] = {
        "hosts": "HOST,HOST,... or @FILE with a host per line, each [USER@]HOST [zone=ZONE]",
        "ssh": "the ssh command and its options",
        "lost_after": "seconds without a connection after which a host counts as lost (10)",
    }
    costs_money: ClassVar[bool] = False

    def __init__(self, settings: ProviderSettings) -> None:
        self._launch, self._folder = settings.launch, Path(settings.folder)
        self._hosts = parse_hosts(settings.options.get("hosts", ""))
        self._ssh = ssh_command(settings.options.get("ssh"), "--option ssh")
        self._lost_after_s = _seconds(settings.options.get("lost_after"), _LOST_AFTER_S)
        self._machines: dict[str, HostMachine] = {}
        self._failures: dict[Host, int] = {}
        self._used: Counter[str] = Counter()
        """How many agents this process has started, by host."""
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)

    def check(self, request: MachineRequest) -> None:
        if not self._hosts:
            raise UsageError("--hosts is missing: name the hosts, as in --hosts a,b,c or --hosts @FILE")
        if request.instance:
            raise UsageError(f"--instance is {request.instance!r}: hosts have no instance type, omit it")
        if not request.zone and len(self._hosts) < request.count:
            raise UsageError(
                f"--nodes is {request.count}, and --hosts names {len(self._hosts)}: name more hosts (one that is named "
                f"twice gets two machines), or use --nodes {len(self._hosts)}"
            )
        if request.zone and all(host.zone != request.zone for host in self._hosts):
            raise UsageError(f"--zone is {request.zone!r}, and no host of --hosts is in it")

    def gpus_of_machines(self) -> Mapping[str, int]:
        """GPUs that a machine of each host has, by host, for those that answer. A host that is named several times
        divides them."""
        named = Counter(host.address for host in self._hosts)
        with ThreadPoolExecutor(_MAX_CONNECTIONS) as threads:
            counts = dict(zip(named, threads.map(self._count_gpus, named), strict=True))
        return {address: count // named[address] for address, count in counts.items() if count is not None}

    def _count_gpus(self, address: str) -> int | None:
        try:
            done = subprocess.run(
                [*self._ssh, address, "sh"],
                input=_COUNT_GPUS,
                capture_output=True,
                text=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        answer = done.stdout.strip()
        return int(answer) if answer.isdecimal() else None

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        chosen = [host for host in self._hosts if request.zone in ("", host.zone)][: request.count]
        lines = [f"ssh {host.address} {spec.agent_command_line(request, zone=host.zone)}" for host in chosen]
        return "# with the token on the standard input of a shell on each host:\n" + "\n".join(lines) + "\n"

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        used = [machine.host for machine in self._machines.values() if machine.state != "ended"]
        free = [host for host in self._hosts if request.zone in ("", host.zone)]
        for host in used:
            with contextlib.suppress(ValueError):
                free.remove(host)
        free.sort(key=lambda host: self._failures.get(host, 0))
        return [self._start(spec, request, host) for host in free[: request.count]]

    def _start(self, spec: LaunchSpec, request: MachineRequest, host: Host) -> str:
        count = 1 + sum(machine.host.address == host.address for machine in self._machines.values())
        id_ = f"{host.address.rpartition('@')[2]}-{count}".replace(":", "-")
        self._note_used(host)
        machine = self._machines[id_] = HostMachine(host, time.time())
        variables = {**spec.environment, **spec.secret_environment, MACHINE_VARIABLE: id_}
        script = _START.format(
            launch=self._launch,
            machine=id_,
            notice_file=NOTICE_FILE_VARIABLE,
            exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            secrets=" ".join(spec.secret_environment),
            command=spec.agent_command_line(request, zone=host.zone).replace("'", "'\\''"),
            report=_REPORT.format(mark=_END_MARK),
        )
        machine.task = asyncio.create_task(self._follow(id_, machine, script))
        return id_

    async def _follow(self, id_: str, machine: HostMachine, script: str) -> None:
        """Start an agent and wait for its end, over as many connections as that takes."""
        status, output, problem = await self._run(machine.host, script, on_connected=lambda: _set_running(machine))
        if machine.state == "pending" and status == SSH_FAILED:
            self._set_ended(machine, f"no connection to {machine.host.address}: {problem}", failed=True)
            self._used[machine.host.address] -= 1  # nothing was started there
            return
        if status not in (0, SSH_FAILED):
            self._set_ended(machine, f"no agent can be started on {machine.host.address}: {problem}", failed=True)
            return
        follow = _FOLLOW.format(launch=self._launch, machine=id_, report=_REPORT.format(mark=_END_MARK))
        lost_at = time.monotonic()
        while _END_MARK not in output:
            machine.reason = f"{machine.host.address} cannot be reached"
            if machine.state != "ended" and time.monotonic() - lost_at >= self._lost_after_s:
                self._set_ended(machine, f"{machine.reason}: {problem}")
            await asyncio.sleep(_RETRY_S)
            if machine.state == "ended":
                if await self._clean_up(id_, machine):
                    return
                continue
            status, output, problem = await self._run(machine.host, follow, on_connected=lambda: _set_running(machine))
        answer, _, log = output.partition(_END_MARK)[2].strip(" ").partition("\n")
        ended = int(answer) if answer.strip().isdigit() else None
        self._set_ended(machine, *describe_agent_end(ended, log))

    async def _clean_up(self, id_: str, machine: HostMachine) -> bool:
        """End what is left on a host that was lost. Returns whether it could be reached."""
        status, _, _ = await self._run(machine.host, self._kill_script([id_]))
        return status != SSH_FAILED

    def _set_ended(self, machine: HostMachine, reason: str, failed: bool = False) -> None:
        machine.state, machine.reason, machine.failed = "ended", reason, failed
        self._failures[machine.host] = self._failures.get(machine.host, 0) + 1

    async def machines(self) -> list[Machine]:
        if not self._machines:
            await self._find_machines()
        return [
            Machine(
                id=id_,
                state=machine.state,
                zone=machine.host.zone,
                price_per_h=0.0,
                started_at=machine.started_at,
                reason=machine.reason,
                failed=machine.failed,
            )
            for id_, machine in self._machines.items()
        ]

    async def _find_machines(self) -> None:
        """Find the machines of a launch that another process has started."""
        script = f'cd "$HOME/.culm/machines/{self._launch}" 2>/dev/null || exit 0\n'
        script += 'for each in *; do kill -0 "$(cat "$each/pid")" 2>/dev/null && echo "$each"; done; true\n'
        hosts = self._used_hosts()
        for host, (_, output, _) in zip(
            hosts, await asyncio.gather(*(self._run(host, script) for host in hosts)), strict=True
        ):
            for id_ in output.split():
                self._machines[id_] = HostMachine(host, 0.0, state="running")

    async def drain(self, ids: list[str], notice_s: float) -> None:
        await self._signal(ids, "TERM", file="agent", before=f'echo {notice_s:g} >"$folder/notice"')

    async def release(self, ids: list[str]) -> None:
        await self._signal(ids, "KILL", file="pid", group="-- -")

    async def _signal(self, ids: Sequence[str], signal: str, *, file: str, group: str = "", before: str = ":") -> None:
        known = [(id_, self._machines[id_].host) for id_ in ids if id_ in self._machines]
        scripts = [
            (
                host,
                _SIGNAL.format(
                    folders=self._remote_folder(id_), file=file, signal=signal, group=group, before=before, rest=""
                ),
            )
            for id_, host in known
        ]
        results = await asyncio.gather(*(self._run(host, script) for host, script in scripts))
        problems = [problem for status, _, problem in results if status == SSH_FAILED]
        if problems:
            raise RunError("; ".join(problems))

    def _remote_folder(self, id_: str) -> str:
        return f'"$HOME/.culm/machines/{self._launch}"/{id_}'

    def _kill_script(self, ids: Sequence[str], rest: str = "") -> str:
        folders = " ".join(map(self._remote_folder, ids))
        return _SIGNAL.format(folders=folders, file="pid", signal="KILL", group="-- -", before=":", rest=rest)

    def notices(self) -> AsyncIterator[MachineNotice]:
        return no_notices()

    def price(self, request: MachineRequest) -> float | None:
        del request
        return 0.0

    async def down(self) -> None:
        tasks = [machine.task for machine in self._machines.values() if machine.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        hosts = self._used_hosts()
        script = self._kill_script(["*"], _REMOVE.format(launch=self._launch))
        results = await asyncio.gather(*(self._run(host, script) for host in hosts))
        left = [host for host, (status, _, _) in zip(hosts, results, strict=True) if status != 0]
        (self._folder / "used").write_text("".join(f"{host.address}\n" for host in left))
        if left:
            names = ", ".join(host.address for host in left)
            problem = next(text for status, _, text in results if status != 0)
            raise RunError(f"{names} cannot be reached ({problem}), and an agent may run there")

    def _note_used(self, host: Host) -> None:
        """Note that something may be on a host, before anything is started there."""
        self._used[host.address] += 1
        with (self._folder / "used").open("a") as file:
            file.write(f"{host.address}\n")

    def _used_hosts(self) -> list[Host]:
        try:
            used = (self._folder / "used").read_text().split("\n")
        except FileNotFoundError:
            return []
        unused = {address for address, count in self._used.items() if not count}
        return [Host(address) for address in dict.fromkeys(used) if address and address not in unused]

    async def _run(
        self, host: Host, script: str, *, on_connected: Callable[[], None] | None = None
    ) -> tuple[int, str, str]:
        """Run a script on a host; (exit status, output, last line of stderr). It is passed on standard input, so that
        it is in no process list. `on_connected`: it may run for long, and this is called when it has begun."""
        async with self._connections if on_connected is None else contextlib.nullcontext():
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._ssh,
                    host.address,
                    "sh",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C in the terminal must not end it
                )
            except OSError as error:
                raise UsageError(f"--option ssh={shlex.join(self._ssh[:1])} cannot be run ({error.strerror})") from None
            try:
                async with asyncio.timeout(_COMMAND_TIMEOUT_S if on_connected is None else None):
                    return await _talk(process, script, on_connected)
            except TimeoutError:
                return SSH_FAILED, "", f"{host.address} did not answer within {_COMMAND_TIMEOUT_S:.0f} s"
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


def _set_running(machine: HostMachine) -> None:
    if machine.state == "pending":
        machine.state = "running"
    machine.reason = ""


async def _talk(
    process: asyncio.subprocess.Process, script: str, on_connected: Callable[[], None] | None
) -> tuple[int, str, str]:
    """Give a shell its script and read its answer."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    reading_errors = asyncio.ensure_future(process.stderr.read())
    with contextlib.suppress(ConnectionError):
        process.stdin.write(f"echo {_BEGIN_MARK}\n{script}".encode())
        await process.stdin.drain()
        process.stdin.close()
    if (await process.stdout.readline()).strip() == _BEGIN_MARK.encode() and on_connected is not None:
        on_connected()
    output, errors = await process.stdout.read(), await reading_errors
    lines = errors.decode(errors="replace").strip().splitlines()
    return await process.wait(), output.decode(errors="replace"), lines[-1] if lines else "the connection has ended"


def _seconds(text: str | None, default: float) -> float:
    """The number of an option. Raises UsageError."""
    try:
        found = default if text is None else float(text)
    except ValueError:
        found = -1.0
    if found < 0:
        raise UsageError(f"--option lost_after is {text!r}: use a number of seconds")
    return found


def parse_hosts(text: str) -> tuple[Host, ...]:
    """The hosts of HOST,HOST,... or of @FILE. Raises UsageError. A host that is named twice gets two machines."""
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--hosts is {text!r}: the file cannot be read ({error})") from None
    else:
        lines = text.split(",")
    return tuple(_parse_host(line.partition("#")[0].split()) for line in lines if line.partition("#")[0].strip())


def _parse_host(words: list[str]) -> Host:
    address, *rest = words
    check_address(address, "--hosts")
    zone = ""
    for word in rest:
        name, equals, zone = word.partition("=")
        if name != "zone" or not equals:
            raise UsageError(f"--hosts has {word!r} after {address}: only zone=ZONE can follow")
    return Host(address, zone)
