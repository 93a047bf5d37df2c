"""Messages between the supervisor of a run and its windows, over a local socket.

A window shows a run: the launcher is one, `culm attach` opens another. A frame is the length of a message, then the
message. The frames that a run has shown can also be kept in a file and read again.
"""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from culm.cluster.run_setup import RunResult, RunSetup
from culm.config import RunConfig
from culm.machines.launch_order import LaunchOrder
from culm.observe.step_metrics import StepMetrics
from culm.providers.fork_server import JobSource

_LENGTH = struct.Struct("!Q")


class StartRun(msgspec.Struct, frozen=True, tag="run"):
    """Execute a run. The first message of a launcher."""

    source: JobSource
    config: RunConfig
    name: str
    """Name of the job on this machine. A number is appended if a running job has it."""
    calls_hook: bool = False
    """Whether the launcher calls Job.on_step after every step and answers with HookReturned."""
    detached: bool = False
    """Whether the run continues when the launcher has ended."""
    launch: LaunchOrder | None = None
    """The machines to start for the run; None: it has machines already."""


class HookReturned(msgspec.Struct, frozen=True, tag="hook"):
    """The launcher has called Job.on_step for a step."""

    step: int
    stopped: bool
    """Whether the hook returned culm.STOP."""
    values: dict[str, float] = {}
    """Named values that the hook returned for the step."""


class InterruptRun(msgspec.Struct, frozen=True, tag="interrupt"):
    """A signal reached the launcher: end at the next step boundary with a checkpoint, or at once if it is the second
    interrupt or nothing can be saved."""

    signal: int
    at_once: bool = False
    """Whether to end without a checkpoint in any case."""


class StopRun(msgspec.Struct, frozen=True, tag="stop"):
    """`culm stop`: end at the next step boundary with a checkpoint, or at once if nothing can be saved."""

    at_once: bool = False


class RunNamed(msgspec.Struct, frozen=True, tag="run_named"):
    """The name under which other windows find the run."""

    name: str


class ProgressShown(msgspec.Struct, frozen=True, tag="progress"):
    """Progress before the first step. A total of 0: the length is not known."""

    text: str
    done: int
    total: int


class SetupShown(msgspec.Struct, frozen=True, tag="setup"):
    """Everything is decided and nothing has been started."""

    setup: RunSetup


class StepShown(msgspec.Struct, frozen=True, tag="step"):
    """A step was committed."""

    metrics: StepMetrics
    at: float
    """Unix time."""


class EventShown(msgspec.Struct, frozen=True, tag="event"):
    """Something happened to the run."""

    text: str
    at: float
    is_notice: bool = False
    """Whether it is about a request to end the run."""


class OutputShown(msgspec.Struct, frozen=True, tag="output"):
    """User code printed a line."""

    text: str
    at: float


class UrlShown(msgspec.Struct, frozen=True, tag="url"):
    """The address of the page that shows the run."""

    url: str


class HistoryEnded(msgspec.Struct, frozen=True, tag="now"):
    """A window that was opened during the run has received what happened before."""


class RunEnded(msgspec.Struct, frozen=True, tag="ended"):
    """The last message of a run."""

    result: RunResult
    stopped: str = ""
    """If the run was asked to end early: what was saved, and how to continue. Else empty."""
    exit_code: int = 0
    """Exit code of a run that was asked to end early."""


ToSupervisor: TypeAlias = StartRun | HookReturned | InterruptRun | StopRun
ToWindow: TypeAlias = (
    RunNamed | ProgressShown | SetupShown | StepShown | EventShown | OutputShown | UrlShown | HistoryEnded | RunEnded
)
_encode_message = msgspec.msgpack.Encoder().encode
_from_window = msgspec.msgpack.Decoder(ToSupervisor)
_from_supervisor = msgspec.msgpack.Decoder(ToWindow)


def encode_frame(message: ToSupervisor | ToWindow) -> bytes:
    """The message as bytes for a socket or a file."""
    body = _encode_message(message)
    return _LENGTH.pack(len(body)) + body


async def _read_frame(reader: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def read_from_window(reader: asyncio.StreamReader) -> ToSupervisor | None:
    """The next message of a window; None: it has closed the connection."""
    body = await _read_frame(reader)
    return None if body is None else _from_window.decode(body)


async def read_from_supervisor(reader: asyncio.StreamReader) -> ToWindow | None:
    """The next message of the supervisor; None: it has closed the connection."""
    body = await _read_frame(reader)
    return None if body is None else _from_supervisor.decode(body)


def read_kept_frames(data: bytes) -> Iterator[ToWindow]:
    """The messages that a run has kept in a file."""
    file = io.BytesIO(data)
    while head := file.read(_LENGTH.size):
        yield _from_supervisor.decode(file.read(_LENGTH.unpack(head)[0]))
