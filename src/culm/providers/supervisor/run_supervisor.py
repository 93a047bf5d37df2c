"""RunSupervisor: executes a run, shows it to its windows, and ends it when its launcher dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from culm.cluster.run_setup import RunResult
from culm.errors import CulmError, RunError, UsageError, message_suffix
from culm.machines.launched_run import LaunchedRun, open_launch
from culm.providers.allocator import return_freed_memory
from culm.providers.execute_run import HookAnswer, execute_run, find_resources
from culm.providers.fork_server import wait_readable
from culm.providers.graceful_stop import GracefulStop, interrupted_message
from culm.providers.local_provider import ForkServerClient
from culm.providers.process_title import set_process_title
from culm.providers.supervisor.output_pipe import OutputPipe
from culm.providers.supervisor.run_feed import RunFeed, WindowLink
from culm.providers.supervisor.run_registry import RegisteredJob
from culm.providers.supervisor.window_messages import (
    HookReturned,
    InterruptRun,
    RunEnded,
    StartRun,
    StopRun,
    ToSupervisor,
    encode_frame,
    read_from_window,
)

if TYPE_CHECKING:
    from culm.observe.step_metrics import StepMetrics
    from culm.providers.fork_server_process import ForkServerProcess

_CHECKPOINT_TIMEOUT_S = 600.0
"""Limit for the last checkpoint of a run whose launcher has ended: no user is left to end a run that cannot write."""


def main(window: int, launcher: int, fork_server: ForkServerProcess, output: int | None) -> None:
    """Supervise the run that the launcher asks for. `window`: descriptor of the socket to it. `output`: descriptor from
    which to read what user code prints."""
    return_freed_memory()
    asyncio.run(_supervise(socket.socket(fileno=window), launcher, ForkServerClient(fork_server), output))


async def _supervise(door: socket.socket, launcher: int, fork_server: ForkServerClient, output: int | None) -> None:
    owner = WindowLink(*await asyncio.open_connection(sock=door))
    start = await read_from_window(owner.reader)
    if isinstance(start, StartRun):
        await RunSupervisor(fork_server, owner, start).run(launcher, output)
    else:
        fork_server.close()


class RunSupervisor:
    """Executes one run. It has an owner, the launcher, and any number of other windows."""

    def __init__(self, fork_server: ForkServerClient, owner: WindowLink, start: StartRun) -> None:
        self._fork_server, self._owner, self._start = fork_server, owner, start
        self._feed = RunFeed(owner)
        self._graceful_stop = GracefulStop(self._feed.show_notice)
        self._job: RegisteredJob | None = None
        self._execution: asyncio.Task[RunResult] | None = None
        self._cancelled = False
        self._exit_code = 0
        """Exit code of a run that was asked to end early; 0: it was not."""
        self._hook_answer: asyncio.Future[HookAnswer] | None = None
        """Whether the run goes on after the last step: the answer of the launcher."""
        self._owner_gone = False
        self._watching: set[asyncio.Task[None]] = set()

    async def run(self, launcher: int, output: int | None) -> None:
        """Execute the run and show it until every window knows its end. No process of it is left afterwards."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._handle_sigterm)
        self._execution = asyncio.create_task(self._execute(output))
        self._watch(self._read_owner())
        self._watch(self._wait_for_launcher(launcher))
        result = await self._execution
        ended = RunEnded(result, self._stopped_message(), self._exit_code)
        if self._job is not None:
            self._job.close(self._feed.history() + encode_frame(ended) if self._start.detached else None)
        await self._feed.end(ended)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def _watch(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _execute(self, output: int | None) -> RunResult:
        """Execute the run. Every error is returned as its result."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(_captured_output(output, self._feed))
                stack.enter_context(self._fork_server)
                await stack.enter_async_context(self._open_to_windows())
                return RunResult(summary=await self._train())
        except asyncio.CancelledError:
            return RunResult(error=RunError.__name__, message="the run was ended")
        except CulmError as error:
            trace = error.trace or traceback.format_exc()
            return RunResult(error=type(error).__name__, message=str(error), traceback_text=trace)
        except Exception as error:
            message = f"the supervisor failed: {type(error).__name__}{message_suffix(error)}"
            return RunResult(error=RunError.__name__, message=message, traceback_text=traceback.format_exc())

    async def _train(self) -> dict[str, Any]:
        start = self._start
        sys.path[:] = dict.fromkeys([*start.source.path, *sys.path])  # for strategies of the user
        async with self._open_launch() as launched:
            return await execute_run(
                self._fork_server,
                start.source,
                find_resources(start.config if launched is None else launched.config, start.source.reference),
                self._feed,
                on_step=self._wait_for_hook if start.calls_hook else None,
                on_cancelled=self._fork_server.kill,
                graceful_stop=self._graceful_stop,
                companion=None if launched is None else launched.keep_machines,
            )

    def _open_launch(self) -> AbstractAsyncContextManager[LaunchedRun | None]:
        """The machines of the run, if they are started for it."""
        start = self._start
        if start.launch is None:
            return contextlib.nullcontext()
        name = start.name if self._job is None else self._job.entry.name
        return open_launch(start.launch, start.config, name, self._feed.show_event)

    @contextlib.asynccontextmanager
    async def _open_to_windows(self) -> AsyncIterator[None]:
        """Register the job, so that `culm attach` finds it. Raises UsageError if a detached run cannot be registered;
        any other run then has no further windows."""
        start = self._start
        try:
            self._job = RegisteredJob(start.name, start.config.folder, start.source.reference)
        except UsageError as error:
            if start.detached:
                raise
            self._feed.show_event(f"culm attach cannot find this run: {error}")
            yield
            return
        set_process_title("supervisor", self._job.entry.name)
        self._feed.show_name(self._job.entry.name)
        server = await asyncio.start_unix_server(self._serve_window, sock=self._job.socket)
        try:
            yield
        finally:
            server.close()

    async def _serve_window(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Show the run to a window that was opened later, and handle its requests."""
        link = WindowLink(reader, writer)
        self._feed.add_window(link)
        while (message := await read_from_window(reader)) is not None:
            if isinstance(message, StopRun):
                self._handle_stop(message)
        self._feed.remove_window(link)
        await link.close()

    def _handle_stop(self, message: StopRun) -> None:
        """A second request does not interrupt the checkpoint, unless it says `at_once`."""
        if message.at_once or not self._graceful_stop.requested:
            self._end_early("stopped by culm stop", 128 + signal.SIGTERM, at_once=message.at_once)

    async def _read_owner(self) -> None:
        """Handle messages of the launcher until it closes the connection."""
        while (message := await read_from_window(self._owner.reader)) is not None:
            self._handle_owner(message)
        self._handle_owner_gone()

    def _handle_owner(self, message: ToSupervisor) -> None:
        if isinstance(message, InterruptRun):
            hint = "; press Ctrl-C again to exit at once"
            self._end_early("interrupted", 128 + message.signal, hint=hint, at_once=message.at_once)
        elif isinstance(message, HookReturned) and self._hook_answer is not None and not self._hook_answer.done():
            self._hook_answer.set_result(HookAnswer(message.values, not message.stopped))

    async def _wait_for_launcher(self, launcher: int) -> None:
        """Wait for the end of the launcher. Its connection may stay open: a process that it forked may hold it."""
        try:
            descriptor = os.pidfd_open(launcher)
        except ProcessLookupError:
            self._handle_owner_gone()
            return
        try:
            await wait_readable(descriptor)
        finally:
            os.close(descriptor)
        self._handle_owner_gone()

    def _handle_owner_gone(self) -> None:
        """Without its launcher a run ends with a checkpoint, unless it is detached."""
        if self._owner_gone:
            return
        self._owner_gone = True
        self._feed.remove_window(self._owner)
        if self._hook_answer is not None and not self._hook_answer.done():
            self._hook_answer.set_result(HookAnswer({}, goes_on=False))
        if self._start.detached or self._execution is None or self._execution.done():
            return
        if not self._graceful_stop.requested:
            self._end_early("the process that started the run has ended", 128 + signal.SIGHUP)
        self._watch(self._cancel_later())

    async def _cancel_later(self) -> None:
        await asyncio.sleep(_CHECKPOINT_TIMEOUT_S)
        self._cancel()

    def _handle_sigterm(self) -> None:
        self._end_early("terminated", 128 + signal.SIGTERM)

    def _end_early(self, reason: str, exit_code: int, *, hint: str = "", at_once: bool = False) -> None:
        """End the run at a step boundary if that saves anything and it is the first request, else at once."""
        self._exit_code = self._exit_code or exit_code
        if at_once or not self._graceful_stop.request(reason, hint):
            self._cancel()

    def _cancel(self) -> None:
        """Cancel the run once: its cleanup must not be interrupted."""
        if self._execution is not None and not self._cancelled:
            self._cancelled = True
            self._execution.cancel()

    async def _wait_for_hook(self, metrics: StepMetrics) -> HookAnswer:
        """Wait until the launcher has called the hook for a step, which it was shown. The run does not go
        on if the hook returned STOP or the launcher is gone."""
        del metrics
        if self._owner_gone:
            return HookAnswer({}, goes_on=False)
        self._hook_answer = asyncio.get_running_loop().create_future()
        return await self._hook_answer

    def _stopped_message(self) -> str:
        return interrupted_message(self._start.config.folder) if self._exit_code else ""


@contextlib.contextmanager
def _captured_output(descriptor: int | None, feed: RunFeed) -> Iterator[None]:
    """Show what user code prints, if it prints to a pipe of this process."""
    if descriptor is None:
        yield
        return
    pipe, loop = OutputPipe(descriptor, feed.show_output), asyncio.get_running_loop()
    loop.add_reader(pipe.read_fd, pipe.read_lines)
    try:
        yield
    finally:
        loop.remove_reader(pipe.read_fd)
        pipe.close()
