"""Hook process: runs the job's hook and the writers beside the agent, so that neither can block or end it.

    agent ──pipe── hook process (on_step in the main thread, one thread for hooks of events and for each writer)

It is forked before the agent starts any thread and ends with the agent. It does nothing unless its node becomes the
leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, NamedTuple

from culm.cluster.leader.output.hook_calls import SLOW_HOOK_S
from culm.cluster.leader.output.hook_runner import (
    HookResult,
    OnEventHookReport,
    OnHookResult,
    RunWriters,
    call_hook,
)
from culm.observe.event_hooks import EventHookReport, call_event_hook
from culm.observe.writers.writer_group import CLOSE_TIMEOUT_S, WriterFailure, WriterGroup
from culm.providers.fork_server import fork
from culm.providers.worker_fork_server import set_parent_death_signal

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from culm.job import Job
    from culm.observe.step_metrics import StepMetrics
    from culm.observe.writers.writer import RunInfo

_CLOSE_MARGIN_S = 5.0
"""How much longer than its writers the process may take to close them."""
_ENDED = "the process of hooks and writers has ended"
EVENT_HOOK_DONE = "event_hook_done"


class EventHookOrder(NamedTuple):
    """Call the hook for an event, and wait this long for it; None: until it returns."""

    event: dict[str, Any]
    timeout_s: float | None


class HookProcess:
    """The agent's side. Create it before the agent starts any thread."""

    def __init__(self, job: Job) -> None:
        agent = os.getpid()
        self._pipe, child_end = Pipe()

        def child() -> None:
            self._pipe.close()
            set_parent_death_signal(agent)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            HookServer(child_end, job).serve()

        self._pid = fork(child)
        child_end.close()
        self._outgoing: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_result: OnHookResult | None = None
        self._on_event_report: OnEventHookReport = lambda _: None
        self._step = 0
        self._pending_event_hooks: deque[Mapping[str, Any]] = deque()
        """Events whose hooks have not returned, in order."""
        self._event_hooks_returned = asyncio.Event()
        self._event_hooks_returned.set()
        self.failures: list[WriterFailure] = []
        self.closed = threading.Event()
        """Set when the writers are closed or the process has ended."""
        self.ended = False

    def create_writers(self, names: Sequence[str]) -> RunWriters:
        return _RemoteWriters(self, tuple(dict.fromkeys(names)))

    def start_hook(self, metrics: StepMetrics, on_result: OnHookResult) -> None:
        self._on_result, self._step = on_result, metrics.step
        if self.ended:
            self._finish_hook(HookResult(metrics.step, gave_up=_ENDED))
        else:
            self.send("hook", metrics)

    def start_event_hook(self, event: Mapping[str, Any], timeout_s: float | None, on_report: OnEventHookReport) -> None:
        self._on_event_report = on_report
        self._pending_event_hooks.append(event)
        if self.ended:
            self._report_pending_event_hooks(_ENDED)
        else:
            self._event_hooks_returned.clear()
            self.send("event_hook", EventHookOrder(dict(event), timeout_s))

    async def finish_event_hooks(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._event_hooks_returned.wait()
        except TimeoutError:
            self._report_pending_event_hooks(f"it did not return within {timeout_s:g} s after the end of the run")

    def _report_pending_event_hooks(self, why: str) -> None:
        while self._pending_event_hooks:
            self._on_event_report(EventHookReport.about(self._pending_event_hooks.popleft(), why=why))
        self._event_hooks_returned.set()

    def send(self, *message: Any) -> None:
        """Send a message without blocking. Starts the threads on first use, which needs a running event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for target in (self._send_queued, self._receive):
                threading.Thread(target=target, name="culm-hooks", daemon=True).start()
        self._outgoing.put(message)

    def end(self) -> None:
        """Kill the process and wait for its end."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _send_queued(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended: `_receive` notices
            while True:
                self._pipe.send(self._outgoing.get())

    def _receive(self) -> None:
        try:
            while True:
                self._post(self._handle, self._pipe.recv())
        except (EOFError, OSError):
            self._post(self._handle_end)
            self.closed.set()

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(function, *args)
        if args and args[0] == "closed":
            self.closed.set()

    def _handle(self, message: HookResult | EventHookReport | WriterFailure | str) -> None:
        if isinstance(message, HookResult):
            self._finish_hook(message)
        elif isinstance(message, EventHookReport):
            self._on_event_report(message)
        elif isinstance(message, WriterFailure):
            self.failures.append(message)
        elif message == EVENT_HOOK_DONE:
            if self._pending_event_hooks:  # else it was reported already
                self._pending_event_hooks.popleft()
            if not self._pending_event_hooks:
                self._event_hooks_returned.set()

    def _handle_end(self) -> None:
        self.ended = True
        self._report_pending_event_hooks(_ENDED)
        self._finish_hook(HookResult(self._step, gave_up=_ENDED))

    def _finish_hook(self, result: HookResult) -> None:
        on_result, self._on_result = self._on_result, None
        if on_result is not None and result.step == self._step:
            on_result(result)


class _RemoteWriters:
    """The writers of a hook process, with the methods of WriterGroup."""

    def __init__(self, process: HookProcess, names: tuple[str, ...]) -> None:
        self._process, self._names = process, names
        self._open = self._reported_end = False

    def open(self, run: RunInfo) -> None:
        if self._names:
            self._open = True
            self._process.send("open", self._names, run)

    def write_step(self, metrics: StepMetrics) -> None:
        if self._open:
            self._process.send("step", metrics)

    def write_event(self, event: Mapping[str, Any]) -> None:
        if self._open:
            self._process.send("event", dict(event))

    def take_failures(self) -> list[WriterFailure]:
        failures, self._process.failures = self._process.failures, []
        if self._process.ended and self._open and not self._reported_end:
            self._reported_end = True
            failures += [WriterFailure(name, _ENDED) for name in self._names]
        return failures

    def close(self, summary: Mapping[str, Any] | None, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Close the writers and wait for them. Runs in a thread."""
        self._open = False
        self._process.send("close", None if summary is None else dict(summary), timeout_s)
        if not self._process.closed.wait(timeout_s * len(self._names) + _CLOSE_MARGIN_S):
            why = "its process does not answer"
            self._process.failures += [WriterFailure(name, why) for name in self._names]

    @property
    def is_open(self) -> bool:
        return self._open


class HookServer:
    """The process itself."""

    def __init__(self, pipe: Connection, job: Job) -> None:
        self._pipe, self._job = pipe, job
        self._hook_calls: queue.SimpleQueue[StepMetrics | None] = queue.SimpleQueue()
        """Steps to call the hook for; None: the agent has ended."""
        self._event_hook_orders: queue.SimpleQueue[EventHookOrder] = queue.SimpleQueue()
        self._writers = WriterGroup(())
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        """Call the hook whenever the agent asks for it, until the agent ends. It runs in the main thread, as it would
        in a training loop."""
        for target in (self._read, self._call_event_hooks):
            threading.Thread(target=target, name="culm-hook-messages", daemon=True).start()
        while (metrics := self._hook_calls.get()) is not None:
            assert self._job.on_step is not None
            self._send(call_hook(self._job.on_step, metrics))

    def _call_event_hooks(self) -> None:
        """Call hooks for events one after the other, each in a thread: no step waits for them."""
        while True:
            self._call_event_hook(self._event_hook_orders.get())
            self._send(EVENT_HOOK_DONE)

    def _call_event_hook(self, order: EventHookOrder) -> None:
        """Call a hook. Report it if it takes long, and again after twice the time. Give it up after its timeout."""
        call = threading.Thread(target=self._run_event_hook, args=(order.event,), name="culm-event-hook", daemon=True)
        call.start()
        waited, pause, limit = 0.0, SLOW_HOOK_S, math.inf if order.timeout_s is None else order.timeout_s
        while True:
            wait_s = min(pause, limit - waited)
            call.join(wait_s)
            waited, pause = waited + wait_s, 2 * pause
            if not call.is_alive():
                return
            given_up = waited >= limit
            why = f"it did not return within {limit:g} s: the run continues without it" if given_up else ""
            self._send(EventHookReport.about(order.event, why=why, seconds=waited))
            if given_up:
                return

    def _run_event_hook(self, event: dict[str, Any]) -> None:
        report = call_event_hook(self._job, event)
        if report is not None:
            self._send(report)

    def _read(self) -> None:
        try:
            while True:
                self._handle(*self._pipe.recv())
        except (EOFError, OSError):
            self._hook_calls.put(None)

    def _handle(self, kind: str, *args: Any) -> None:
        if kind == "hook":
            self._hook_calls.put(args[0])
        elif kind == "event_hook":
            self._event_hook_orders.put(args[0])
        elif kind == "open":
            self._writers = WriterGroup(args[0])
            self._writers.open(args[1])
        elif kind == "step":
            self._writers.write_step(args[0])
        elif kind == "event":
            self._writers.write_event(args[0])
        else:
            self._writers.close(*args)
        for failure in self._writers.take_failures():
            self._send(failure)
        if kind == "close":
            self._send("closed")

    def _send(self, message: HookResult | EventHookReport | WriterFailure | str) -> None:
        with self._send_lock, contextlib.suppress(OSError):  # the agent is gone: `_read` notices
            self._pipe.send(message)
