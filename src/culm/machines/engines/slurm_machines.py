"""`--on slurm`: each machine is one element of a job array, which runs one agent.

The elements are independent: a lost one never restarts the others. `--requeue` lets Slurm start an element again, as a
new machine; `--signal=B:TERM@SECONDS` is the notice before a time limit. A preemption is found in the listing of the
elements: at the beginning of a grace time Slurm signals job steps only, and not the script with the agent. The token is
in a file that only the user can read, in the folder of the launch: this machine and those of the cluster share the
user's files, as usual with Slurm.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar, NamedTuple

from culm.cluster.agent.preemption_notice import NOTICE_FILE_VARIABLE
from culm.errors import RunError, UsageError
from culm.machines.agent_process import describe_agent_end, log_end, write_private
from culm.machines.machine_provider import (
    LABEL,
    MACHINE_VARIABLE,
    EngineMissing,
    LaunchSpec,
    Machine,
    MachineNotice,
    MachineRequest,
    MachineState,
    ProviderSettings,
)
from culm.providers.child_environment import environment_without_secrets

_TIMEOUT_S = 30.0
_END_POLL_S, _END_TIMEOUT_S = 0.2, 30.0
_NOTICE_POLL_S = 5.0
_RUNNING = ("RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT", "SUSPENDED")
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "REQUEUE_FED")
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@{grace}
#SBATCH --output={folder}/%A_%a.log
{directives}{exports}export {machine}=${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}.${{SLURM_RESTART_COUNT:-0}}
export {notice_file}={folder}/${machine}.notice
CULM_TOKEN=$(cat {folder}/token) && export CULM_TOKEN || exit 2
# Slurm signals this shell; the agent gets the notice from it.
{command} &
trap 'kill -TERM $! 2>/dev/null' TERM
wait $!
status=$?
while kill -0 $! 2>/dev/null; do
    wait $!
    status=$?
done
exit $status
"""


class SlurmElement(NamedTuple):
    """An element of a job array, as scontrol shows it."""

    element: str
    """ARRAYJOB_INDEX."""
    restarts: int
    state: str
    reason: str
    exit_status: int | None
    started_at: float
    partition: str = ""
    preempted_at: float | None = None
    """Unix time at which Slurm decided to preempt it; None: it did not."""
    ends_at: float | None = None
    """Unix time at which Slurm ends it, as far as that is known."""


class SlurmMachines:
    """Machines that are elements of job arrays."""

    name: ClassVar[str] = "slurm"
    options: ClassVar[Mapping[str, str]] = {
        "partition": "partition of the jobs",
        "account": "account that is charged",
        "qos": "quality of service",
        "time": "time limit of a job, as in 12:00:00",
        "cpus-per-task": "cores of a machine",
        "mem": "memory of a machine, as in 64G",
        "gres": "generic resources, as in gpu:8",
        "constraint": "features that nodes must have",
        "exclusive": "user, mcs or exclusive: share nodes or not",
        "nodelist": "nodes to use",
    }
    costs_money: ClassVar[bool] = False

    def __init__(self, settings: ProviderSettings) -> None:
        self._name = f"culm-{settings.launch}"
        self._folder, self._options = Path(settings.folder), dict(settings.options)
        self._told_to_start: set[str] = set()

    def check(self, request: MachineRequest) -> None:
        if request.zone:
            raise UsageError(f"--zone is {request.zone!r}: Slurm has no zones, use --option constraint or nodelist")
        missing = [program for program in ("sbatch", "scontrol", "scancel", "squeue") if shutil.which(program) is None]
        if missing:
            raise EngineMissing(f"--on slurm needs {', '.join(missing)}: launch from a machine with Slurm's commands")

    def manifest(self, spec: LaunchSpec, request: MachineRequest) -> str:
        given = dict(self._options) | ({"constraint": request.instance} if request.instance else {})
        return _SCRIPT.format(
            name=self._name,
            last=request.count - 1,
            grace=max(1, round(spec.grace_s)),
            folder=shlex.quote(str(self._folder)) if str(self._folder) != "." else "FOLDER",
            directives="".join(f"#SBATCH --{name}={value}\n" for name, value in given.items())
            + f"#SBATCH --comment={LABEL}={spec.launch}\n",
            exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in spec.environment.items()),
            machine=MACHINE_VARIABLE,
            notice_file=NOTICE_FILE_VARIABLE,
            command=spec.agent_command_line(request),
        )

    async def request(self, spec: LaunchSpec, request: MachineRequest) -> list[str]:
        write_private(self._folder / "token", spec.token)
        answer = await _run("sbatch", "--parsable", script=self.manifest(spec, request))
        job = answer.strip().partition(";")[0]
        return [f"{job}_{index}.0" for index in range(request.count)]

    async def machines(self) -> list[Machine]:
        elements = await self._elements()
        await self._start_requeued(elements)
        return [each for element in elements for each in self._describe(element)]

    async def _elements(self) -> list[SlurmElement]:
        """All elements of the launch that Slurm still knows."""
        listing = await _run("squeue", "--me", "--noheader", "--states=all", f"--name={self._name}", "--format=%F")
        jobs = sorted(set(listing.split()))
        if not jobs:
            return []
        shown = await asyncio.gather(
            *(_run("scontrol", "--oneliner", "show", "job", job, missing_ok=True) for job in jobs)
        )
        return [each for text in shown for line in text.splitlines() for each in parse_elements(line)]

    async def _start_requeued(self, elements: Sequence[SlurmElement]) -> None:
        """Slurm holds a requeued element for two minutes: let it start at once."""
        for element in elements:
            key = f"{element.element}.{element.restarts}"
            if element.restarts and element.state == "PENDING" and key not in self._told_to_start:
                self._told_to_start.add(key)
                with contextlib.suppress(RunError):  # not every cluster allows it; then the element comes later
                    await _run("scontrol", "update", f"JobId={element.element}", "StartTime=now")

    def _describe(self, element: SlurmElement) -> list[Machine]:
        """An element is one machine, and another one after each restart."""
        state: MachineState = "ended"
        if element.state in _RUNNING:
            state = "running"
        elif element.state in _PENDING:
            state = "pending"
        reason, failed = element.reason if state == "pending" else "", False
        if state == "ended":
            reason, failed = f"Slurm ended it: {element.state}", False
            if element.state in ("FAILED", "COMPLETED"):
                log = log_end(self._folder / f"{element.element}.log")
                reason, failed = describe_agent_end(element.exit_status, log)
        now = Machine(
            id=f"{element.element}.{element.restarts}",
            state=state,
            started_at=element.started_at,
            reason=reason,
            failed=failed,
        )
        gone = [
            Machine(id=f"{element.element}.{number}", state="ended", reason="Slurm has requeued its job")
            for number in range(element.restarts)
        ]
        return [*gone, now]

    async def drain(self, ids: list[str], notice_s: float) -> None:
        for id_ in ids:
            (self._folder / f"{id_}.notice").write_text(f"{notice_s:g}")
        if ids:
            await _run("scancel", "--quiet", "--batch", "--signal=TERM", *map(_element_of, ids), missing_ok=True)

    async def release(self, ids: list[str]) -> None:
        if ids:
            await _run("scancel", "--quiet", *map(_element_of, ids), missing_ok=True)

    async def notices(self) -> AsyncIterator[MachineNotice]:
        """Preemptions with a grace time."""
        reported: set[str] = set()
        while True:
            await asyncio.sleep(_NOTICE_POLL_S)
            for element in await self._elements():
                id_ = f"{element.element}.{element.restarts}"
                if element.state == "RUNNING" and element.preempted_at is not None and id_ not in reported:
                    reported.add(id_)
                    ends_at = element.preempted_at + await self._grace_s(element.partition)
                    if element.ends_at is not None:
                        ends_at = min(ends_at, element.ends_at)
                    yield MachineNotice(id_, max(0.0, ends_at - time.time()), "Slurm preempts its job")

    async def _grace_s(self, partition: str) -> float:
        """Seconds between the preemption of a job and its end."""
        shown = await _run("scontrol", "--oneliner", "show", "partition", partition)
        found = re.search(r"\bGraceTime=(\d+)", shown)
        return float(found[1]) if found else 0.0

    def price(self, request: MachineRequest) -> float | None:
        del request
        return 0.0

    async def down(self) -> None:
        await _run("scancel", "--quiet", "--me", f"--name={self._name}", missing_ok=True)
        until = time.monotonic() + _END_TIMEOUT_S
        while left := [each for each in await self._elements() if each.state in (*_RUNNING, *_PENDING)]:
            if time.monotonic() >= until:
                raise RunError(f"Slurm has not ended {', '.join(each.element for each in left)} yet")
            await asyncio.sleep(_END_POLL_S)
        for path in (self._folder / "token", *self._folder.glob("*.log")):
            path.unlink(missing_ok=True)


def _element_of(id_: str) -> str:
    return id_.rpartition(".")[0]


def parse_elements(line: str) -> list[SlurmElement]:
    """The elements that one line of `scontrol --oneliner show job` describes. Elements that wait share a line."""
    fields = dict(re.findall(r"(\w+)=(\S*)", line))
    if "ArrayTaskId" not in fields:
        return []
    code, _, number = fields.get("ExitCode", "").partition(":")
    status = None if number not in ("", "0") or not code.isdigit() else int(code)
    return [_element(fields, index, status) for index in _indices(fields["ArrayTaskId"])]


def _element(fields: Mapping[str, str], index: int, status: int | None) -> SlurmElement:
    reason = fields.get("Reason", "")
    return SlurmElement(
        f"{fields['ArrayJobId']}_{index}",
        int(fields.get("Restarts", "0") or 0),
        fields.get("JobState", ""),
        "" if reason == "None" else reason,
        status,
        _unix_time(fields.get("StartTime", "")) or 0.0,
        fields.get("Partition", ""),
        _unix_time(fields.get("PreemptTime", "")),
        _unix_time(fields.get("EndTime", "")),
    )


def _unix_time(text: str) -> float | None:
    """A time of Slurm, such as 2026-11-19T20:47:52; None for words such as Unknown."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _indices(text: str) -> list[int]:
    """The numbers of "3", "0-3" or "0-2,5%4"."""
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        first, dash, last = part.partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return found


async def _run(*command: str, script: str = "", missing_ok: bool = False) -> str:
    """The output of a command of Slurm. Raises RunError with its last line, unless it says that a job does not exist
    and `missing_ok` is set."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment_without_secrets(),  # Slurm keeps the environment of sbatch, and gives it to the job
            start_new_session=True,
        )
    except OSError as error:
        raise RunError(f"{command[0]} cannot be run ({error.strerror})") from None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, errors = await process.communicate(script.encode())
    except TimeoutError:
        raise RunError(f"{command[0]} did not answer within {_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    error_text = errors.decode(errors="replace").strip()
    if process.returncode and not (missing_ok and "nvalid job id" in error_text):
        raise RunError(
            f"{command[0]}: {error_text.splitlines()[-1] if error_text else f'exit status {process.returncode}'}"
        )
    return output.decode(errors="replace")
