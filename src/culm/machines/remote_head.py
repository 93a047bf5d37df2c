"""A head: a machine that stays up, on which a launch has its store and its supervisor, reached with ssh, or a Pod of
Kubernetes, reached with kubectl.

The launching machine sends the job's files and the arguments of `culm launch` to `culm head receive` on the head, which
runs that command there, detached. From then on the head does not need the launching machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

import culm
from culm.errors import RunError, UsageError
from culm.machines.head_registry import HeadLaunch
from culm.machines.job_archive import JobArchive, unpack_job
from culm.machines.launch_registry import is_registered, launches_folder
from culm.machines.ssh_command import SSH_FAILED, check_address, ssh_command
from culm.providers.advertised_address import LOOPBACK, default_address

_NOT_FOUND = 127
"""Exit status of a shell that does not find a command."""
_ANSWER_TIMEOUT_S = 60.0
"""Limit for a short command on a head."""


class HeadOrder(msgspec.Struct, frozen=True):
    """What `culm head receive` reads from its standard input."""

    launch: str
    """Name of the launch."""
    digest: str
    """SHA-256 of `archive`."""
    archive: bytes
    """The files of the job."""
    reference: str
    """FILE[:function], relative to the top folder of the archive."""
    arguments: tuple[str, ...]
    """The further arguments of `culm launch`."""


def head_command(address: str, given: str | None) -> tuple[str, ...]:
    """The command that reaches a head, with its options. Raises UsageError for an address or a command that is none."""
    if is_pod(address):
        try:
            return tuple(shlex.split(given or "") or ["kubectl"])
        except ValueError as error:
            raise UsageError(f"--head-ssh is {given!r}: {error}") from None
    check_address(address, "--head")
    return tuple(ssh_command(given, "--head-ssh"))


def is_pod(address: str) -> bool:
    """Whether a head is a Pod, as in pod/culm-head-0."""
    return re.fullmatch(r"pod/[a-z0-9]([a-z0-9.-]*[a-z0-9])?", address) is not None


def check_head(head: HeadLaunch) -> None:
    """Raise UsageError in one sentence if the head cannot be reached, or has no culm of this version."""
    status, output, problem = _talk(head, ["--version"])
    place = f"--head is {head.head!r}"
    if status == SSH_FAILED:
        raise UsageError(f"{place}: it cannot be reached: {problem}")
    if status == _NOT_FOUND:
        raise UsageError(f"{place}: {head.program[0]} is not there, install culm, or name it with --program")
    if status != 0:
        raise UsageError(f"{place}: {shlex.join(head.program)} cannot be run there: {problem}")
    version = output.strip().removeprefix("culm ")
    if version != culm.__version__:
        raise UsageError(f"{place}: it has culm {version}, and this machine {culm.__version__}: install the same")


def start_on_head(head: HeadLaunch, archive: JobArchive, arguments: Sequence[str]) -> tuple[int, str]:
    """Run `culm launch` on a head. Returns its exit code and what it printed; its errors go to stderr."""
    order = HeadOrder(head.launch, archive.digest, archive.data, archive.reference, tuple(arguments))
    command = _remote(head, ["head", "receive"])
    done = subprocess.run(command, input=msgspec.msgpack.encode(order), stdout=subprocess.PIPE, check=False)
    if done.returncode == SSH_FAILED:
        raise RunError(
            f"the connection to {head.head} has ended, and the launch may have started there: see culm list, and end "
            f"it with culm down {head.launch}"
        )
    return done.returncode, done.stdout.decode(errors="replace")


@contextlib.contextmanager
def received_job(data: bytes) -> Iterator[tuple[str, ...]]:
    """Unpack a HeadOrder into the folder of its launch, and yield the arguments of culm that start it. The files go
    with the launch; afterwards they are removed if it was not started."""
    try:
        order = msgspec.msgpack.decode(data, type=HeadOrder)
    except msgspec.MsgspecError:
        raise UsageError("standard input is no launch: culm launch --head uses this command") from None
    folder = launches_folder() / order.launch
    if folder.parent != launches_folder() or folder.exists():
        raise UsageError(f"{order.launch!r} cannot be the name of a launch here")
    folder.mkdir(parents=True, mode=0o700)
    try:
        root = unpack_job(order.archive, order.digest, folder)
        yield (
            "launch",
            f"{root}/{order.reference}",
            "--launch-name",
            order.launch,
            *order.arguments,
            *_own_address(order),
        )
    finally:
        if not is_registered(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _own_address(order: HeadOrder) -> list[str]:
    """On a head without a route to the outside, machines reach it at the address at which ssh did."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    is_given = any(argument.startswith("--address=") for argument in order.arguments)
    return [] if is_given or not connection or default_address() != LOOPBACK else [f"--address={connection[2]}"]


def show_on_head(head: HeadLaunch, arguments: Sequence[str]) -> int:
    """Run a command of culm on a head in this terminal, and return its exit code. Raises RunError."""
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    status = subprocess.call(_remote(head, arguments, terminal=on_terminal))
    if status == SSH_FAILED:
        raise RunError(f"the head {head.head} cannot be reached; the run goes on there")
    return status


def list_on_head(head: HeadLaunch) -> dict[str, Any] | None:
    """The row of a launch in `culm list --json` of its head; None: it has ended. Raises RunError without an answer."""
    status, output, problem = _talk(head, ["list", "--json"])
    if status != 0:
        raise RunError(f"the head {head.head} does not answer: {problem}")
    rows: list[dict[str, Any]] = json.loads(output)
    return next((row for row in rows if row["launch"] == head.launch), None)


def _talk(head: HeadLaunch, arguments: Sequence[str]) -> tuple[int, str, str]:
    """(exit status, output, last line of stderr) of a short command of culm on a head."""
    try:
        done = subprocess.run(
            _remote(head, arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return SSH_FAILED, "", f"no answer within {_ANSWER_TIMEOUT_S:.0f} s"
    except OSError as error:
        raise UsageError(f"{head.ssh[0]} cannot be run ({error.strerror})") from None
    lines = done.stderr.strip().splitlines()
    return done.returncode, done.stdout, lines[-1] if lines else "the connection has ended"


def _remote(head: HeadLaunch, arguments: Sequence[str], *, terminal: bool = False) -> list[str]:
    """The command that runs a command of culm on a head."""
    line = shlex.join([*head.program, *arguments])
    if is_pod(head.head):
        return [*head.ssh, "exec", "--stdin", *["--tty"] * terminal, head.head, "--", "sh", "-c", line]
    return [*head.ssh, *["-t"] * terminal, head.head, line]
