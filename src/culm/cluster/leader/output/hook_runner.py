"""Where the job's hook and the writers run: in a process of their own, or in this one (simulated clusters)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from culm import errors
from culm.errors import CulmError, RunError
from culm.observe.event_hooks import EventHookReport, call_event_hook
from culm.observe.step_metrics import read_hook_result
from culm.observe.writers.writer_group import CLOSE_TIMEOUT_S, WriterFailure, WriterGroup
from culm.runtime.compute.user_errors import ASYNC_USER_EXCEPTIONS

if TYPE_CHECKING:
    from culm.job import Job, StepHook
    from culm.observe.step_metrics import StepMetrics
    from culm.observe.writers.writer import RunInfo


class HookResult(msgspec.Struct, frozen=True, tag="hook_result"):
    """What the on_step hook did for a step."""

    step: int
    values: dict[str, float] = {}
    stopped: bool = False
    """Whether the hook ends the run after this step."""
    error_class: str = ""
    """The class of the error that ends the run; empty: the hook returned."""
    message: str = ""
    gave_up: str = ""
    """Why the hook is not called any more, if its process ended or did not answer; the run goes on without it."""

    def raise_if_failed(self) -> None:
        """Raise the error of a hook that raised."""
        if self.error_class:
            kind: type[CulmError] = getattr(errors, self.error_class, RunError)
            raise kind(self.message)


OnHookResult: TypeAlias = Callable[[HookResult], None]
OnEventHookReport: TypeAlias = Callable[[EventHookReport], None]
decode_hook_result = msgspec.msgpack.Decoder(HookResult).decode


class RunWriters(Protocol):
    """The writers beside the run folder; see WriterGroup."""

    def open(self, run: RunInfo) -> None: ...
    def write_step(self, metrics: StepMetrics) -> None: ...
    def write_event(self, event: Mapping[str, Any]) -> None: ...
    def take_failures(self) -> list[WriterFailure]: ...
    def close(self, summary: Mapping[str, Any] | None, timeout_s: float = CLOSE_TIMEOUT_S) -> None: ...
    @property
    def is_open(self) -> bool: ...


class HookRunner(Protocol):
    """Runs the user's code on behalf of the leader."""

    def create_writers(self, names: Sequence[str]) -> RunWriters:
        """Writers by name, not opened yet."""

    def start_hook(self, metrics: StepMetrics, on_result: OnHookResult) -> None:
        """Call the job's on_step hook. `on_result` is called on the event loop, at once or later."""

    def start_event_hook(self, event: Mapping[str, Any], timeout_s: float | None, on_report: OnEventHookReport) -> None:
        """Call the job's hook for an event, such as on_checkpoint, after those of earlier events. `on_report` is called
        on the event loop, at once or later, if it raises or takes long. After `timeout_s` the next one is called."""

    async def finish_event_hooks(self, timeout_s: float) -> None:
        """Wait until the hooks for events have returned. Those that have not returned in time are reported."""


class InlineHookRunner:
    """Runs the hook in this process and writers in its threads, for simulated clusters."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def create_writers(self, names: Sequence[str]) -> RunWriters:
        return WriterGroup(names)

    def start_hook(self, metrics: StepMetrics, on_result: OnHookResult) -> None:
        assert self._job.on_step is not None
        on_result(call_hook(self._job.on_step, metrics))

    def start_event_hook(self, event: Mapping[str, Any], timeout_s: float | None, on_report: OnEventHookReport) -> None:
        del timeout_s
        report = call_event_hook(self._job, event)
        if report is not None:
            on_report(report)

    async def finish_event_hooks(self, timeout_s: float) -> None:
        pass


def call_hook(on_step: StepHook, metrics: StepMetrics) -> HookResult:
    """Call a hook. An exception of it becomes part of the result."""
    try:
        values, stopped = read_hook_result(on_step(metrics), metrics)
    except ASYNC_USER_EXCEPTIONS as error:
        if isinstance(error, CulmError):
            return HookResult(metrics.step, error_class=type(error).__name__, message=str(error))
        message = f"Job.on_step raised {type(error).__name__}{errors.message_suffix(error)}"
        return HookResult(metrics.step, error_class=errors.LayerFailed.__name__, message=message)
    return HookResult(metrics.step, values, stopped)
