"""Windows of a run: processes that show it. The launcher starts the supervisor; `culm attach` connects to one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from culm.errors import RunError
from culm.providers.execute_run import call_step_hook
from culm.providers.provider import describe_exit
from culm.providers.supervisor.window_messages import (
    EventShown,
    HistoryEnded,
    HookReturned,
    InterruptRun,
    OutputShown,
    ProgressShown,
    RunEnded,
    RunNamed,
    SetupShown,
    StartRun,
    StepShown,
    StopRun,
    ToSupervisor,
    ToWindow,
    UrlShown,
    encode_frame,
    read_from_supervisor,
    read_kept_frames,
)

if TYPE_CHECKING:
    from culm.job import StepHook
    from culm.providers.execute_run import RunObserver
    from culm.providers.supervisor.run_registry import FoundJob

END_TIMEOUT_S = 10.0
"""Limit for a supervisor to end everything at once, before it is killed."""
_MAX_INTERRUPTS = 4
"""Interrupts that are passed on to the supervisor. It ends the run at once after the second; further ones kill it."""


class RunStopped(RunError):
    """The run was asked to end before its last step."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def summary_or_raise(ended: RunEnded) -> dict[str, Any]:
    """The fields of summary.json. Raises the error that ended the run, or RunStopped if it was asked to end early."""
    if ended.stopped:
        raise RunStopped(ended.stopped, ended.exit_code)
    if ended.result.summary is None:
        raise ended.result.to_error()
    return ended.result.summary


def show_message(
    message: ToWindow, observer: RunObserver, on_notice: Callable[[str], None], on_output: Callable[[str], None]
) -> None:
    """Show a message of the supervisor. `on_notice` gets sentences about requests to end the run, `on_output` lines
    that user code printed."""
    match message:
        case ProgressShown(text, done, total):
            observer.show_progress(text, done, total)
        case SetupShown(setup):
            observer.show_setup(setup)
        case StepShown(metrics):
            observer.show_step(metrics)
        case EventShown(text, _, is_notice):
            (on_notice if is_notice else observer.show_event)(text)
        case OutputShown(text):
            on_output(text)
        case UrlShown(url):
            observer.show_url(url)


class SupervisorClient:
    """The launcher's side of a supervisor process. Start it early: its fork server imports torch meanwhile.

    User code prints to the descriptors `stdout` and `stderr`; default: those of this process. With `captures_output`
    the supervisor reads what it prints and passes it on, so that nothing is held up while this process is stopped.
    """

    def __init__(
        self,
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        captures_output: bool = False,
        end_timeout_s: float = END_TIMEOUT_S,
    ) -> None:
        self._socket, child_end = socket.socketpair()
        arguments = [child_end.fileno(), os.getpid(), int(captures_output)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "culm.providers.supervisor.supervisor_process", *map(str, arguments)],
            pass_fds=[child_end.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        child_end.close()
        self._writer: asyncio.StreamWriter | None = None
        self._interrupts = 0
        self._end_timeout_s = end_timeout_s
        self._abandoned = False
        """Whether the supervisor goes on without this process: the run is detached, or ends with a checkpoint."""

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` was called."""
        return self._interrupts > 0

    async def execute_run(
        self,
        start: StartRun,
        observer: RunObserver,
        *,
        on_step: StepHook | None = None,
        on_notice: Callable[[str], None],
        on_output: Callable[[str], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Run a job to its end and return the fields of summary.json. Raises the error that ended the run.

        `on_step` is called in this process after every step; set `StartRun.calls_hook` for it. If it raises, or if this
        coroutine is cancelled, the run ends at once. If the run cannot be shown any more, because the terminal was
        closed, the run ends with a checkpoint, and is not waited for.
        """
        async with contextlib.aclosing(self._messages(start)) as messages:
            async for message in messages:
                with self._abandon_on_error():
                    show_message(message, observer, on_notice, on_output)
                if isinstance(message, StepShown) and on_step is not None:
                    values, goes_on = call_step_hook(on_step, message.metrics)
                    self._send(HookReturned(message.metrics.step, not goes_on, values))
                if isinstance(message, RunEnded):
                    return summary_or_raise(message)
        raise self._exit_error(start)

    @contextlib.contextmanager
    def _abandon_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            self._abandoned = True
            raise

    async def start_detached(self, start: StartRun, observer: RunObserver) -> str:
        """Start a run that goes on without this process, and return its name when everything is decided and the nodes
        are about to start. Raises the error that ended the run before that."""
        name = start.name
        async with contextlib.aclosing(self._messages(start)) as messages:
            async for message in messages:
                show_message(message, observer, observer.show_event, observer.show_event)
                if isinstance(message, RunNamed):
                    name = message.name
                elif isinstance(message, SetupShown):
                    self._abandoned = True
                    return name
                elif isinstance(message, RunEnded):
                    summary_or_raise(message)
        raise self._exit_error(start)

    async def _messages(self, start: StartRun) -> AsyncGenerator[ToWindow, None]:
        """Start the run and yield what the supervisor shows. If the generator is closed before the end of a run that
        was not abandoned, the run ends at once."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        message = None
        try:
            self._send(start)
            for _ in range(self._interrupts):
                self._send(InterruptRun(signal.SIGINT))
            while (message := await read_from_supervisor(reader)) is not None:
                yield message
        finally:
            if not self._abandoned and not isinstance(message, RunEnded):
                self._send(InterruptRun(signal.SIGINT, at_once=True))
            self._writer.close()

    def _send(self, message: ToSupervisor) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_frame(message))

    def interrupt(self, number: int = signal.SIGINT) -> bool:
        """Pass an interrupt on to the supervisor. Returns False if it has ignored all earlier ones."""
        self._interrupts += 1
        self._send(InterruptRun(number))
        return self._interrupts <= _MAX_INTERRUPTS

    def _exit_error(self, start: StartRun) -> RunError:
        """The error for a connection that the supervisor has closed without a result."""
        status = self._process.wait()
        hint = "is there enough memory?" if status == -signal.SIGKILL else "its nodes have ended with it"
        left = "" if start.launch is None else f"; end its machines with culm down {start.name}"
        return RunError(f"the supervisor of the run has {describe_exit(status)}: {hint}{left}")

    def close(self) -> None:
        """Wait for the end of the supervisor, unless it goes on without this process. A supervisor that does not end is
        killed, and with it everything that it has started."""
        if self._writer is None:
            self._socket.close()  # it has not been asked to run anything
        if self._abandoned:
            return
        try:
            self._process.wait(self._end_timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> SupervisorClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def attached_messages(job: FoundJob) -> AsyncGenerator[ToWindow, None]:
    """Open a window of a job and yield what it has shown so far, then everything new until its end. Closing the window
    does not affect the run. The kept history of an ended job ends with RunEnded, too."""
    if not job.running:
        for kept in read_kept_frames(job.history()):
            yield kept
        return
    reader, writer = await asyncio.open_connection(sock=job.connect())
    try:
        while (message := await read_from_supervisor(reader)) is not None:
            yield message
    finally:
        writer.close()


async def stop_job(job: FoundJob, *, at_once: bool, on_line: Callable[[str], None]) -> RunEnded:
    """Ask a running job to end, and wait until it has. `on_line` gets its notices. Raises RunError if its supervisor
    was killed."""
    reader, writer = await asyncio.open_connection(sock=job.connect())
    history = True
    try:
        while (message := await read_from_supervisor(reader)) is not None:
            if isinstance(message, HistoryEnded):
                history = False
                writer.write(encode_frame(StopRun(at_once)))
            elif isinstance(message, EventShown) and not history:
                on_line(message.text)
            elif isinstance(message, RunEnded):
                return message
    finally:
        writer.close()
    raise RunError(f"the supervisor of job {job.entry.name!r} was killed")
