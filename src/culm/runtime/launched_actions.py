"""Actions that were launched on a device and are not complete yet.

The executor launches actions without waiting for the device. What follows from an action, keeping and sending its
output, is done here once the output is in host memory. On a CPU an action is complete when it returns, and this module
is not called.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from culm.transport.interface import FrameKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from culm.device.device_copies import HostCopy
    from culm.device.streams import DeviceEvent
    from culm.runtime.clock import Clock
    from culm.runtime.worker_state import WorkerState
    from culm.transport.interface import Address, Transport

MAX_LAUNCHED = 2
"""Actions that may be launched beyond what is complete: enough to keep the device busy, few enough to halt quickly."""

COPY_SPAN = "copy"
"""The first word of the names of spans in which an output was copied to the host, as in "copy 1F0"."""
_MAX_REFERENCE_S = 60.0
_TURNS_TO_SEND = 3
"""Turns of the event loop between the end of a wait for an event, in a thread, and the sending of its output."""


@dataclass(slots=True, eq=False, kw_only=True)
class LaunchedAction:
    """An action on the device."""

    step: int
    label: str
    work: str | None
    """Its segment and kind, as in 2F. None: it does not count for the pace of the worker (a forward of a replica)."""
    launched_at: float
    event: DeviceEvent
    """Complete when the action is done and its output, if it has one, is in host memory."""
    computed: DeviceEvent
    """Complete when the action is done. Timed, as `event` is."""
    output_name: str | None = None
    output: HostCopy | None = None
    """None: it has no output that is kept or sent."""
    keeps_output: bool = False
    target_addresses: tuple[Address, ...] = ()


class LaunchedActions:
    """The launched actions of one worker in one epoch, in order."""

    def __init__(
        self,
        state: WorkerState,
        transport: Transport,
        clock: Clock,
        epoch: int,
        first_step: int,
        after_action: Callable[[int, str], Awaitable[None]],
    ) -> None:
        """`first_step`: the first step that is not recovered in this epoch; what is kept of earlier ones is needed.
        `after_action(step, label)` is called for each complete action, before its output is sent."""
        self._state, self._copies, self._transport, self._clock = state, state.copies, transport, clock
        self._epoch, self._after_action = epoch, after_action
        self._evict = functools.partial(state.evict_oldest, first_step)
        self._launched: collections.deque[LaunchedAction] = collections.deque()
        self._closed = False
        self._completing: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.actions_done = 0
        """Number of complete actions."""
        self.slowest_action_s = 0.0
        self._reference, self._reference_at = state.copies.copy_event(), clock.now()
        """An event, and its time. The first one is complete at once: the device has nothing to copy."""
        self._least_delay_s = math.inf
        """From the completion of an action to its being noticed, the least since the reference."""
        self._last_computed_at = self._last_copied_at = 0.0

    async def wait_for_room(self) -> None:
        """Wait until another action may be launched. Raises what the completion of an earlier one raised. Outputs that
        are complete are sent first: other workers wait for them, and a launch takes milliseconds."""
        for _ in range(_TURNS_TO_SEND):
            await asyncio.sleep(0)
        await self._wait_until_below(MAX_LAUNCHED)
        await self._copies.make_room(self._evict, self._transport.release_sent_frames)

    async def wait_until_complete(self) -> None:
        """Wait until every launched action is complete, and its output is kept and sent."""
        await self._wait_until_below(1)

    async def _wait_until_below(self, count: int) -> None:
        while True:
            self._changed.clear()
            if self._completing is not None and self._completing.done():
                self._completing.result()
            if len(self._launched) < count:
                return
            await self._changed.wait()

    def add(self, action: LaunchedAction) -> None:
        """Register an action. Between its launch and this call nothing may wait."""
        self._launched.append(action)
        if self._completing is None or self._completing.done():
            self._completing = asyncio.create_task(self._complete_all())
            self._completing.add_done_callback(self._on_completed)

    def _on_completed(self, task: asyncio.Task[None]) -> None:
        self._changed.set()
        if not task.cancelled():
            task.exception()  # an executor that was cancelled never reads it

    async def _complete_all(self) -> None:
        while self._launched:
            action = self._launched[0]
            await action.event.wait()
            await self._complete(action)
            self._launched.popleft()
            self._changed.set()

    async def _complete(self, action: LaunchedAction) -> None:
        name, output = action.output_name, action.output
        if name is not None and output is not None and action.keeps_output:
            self._state.keep_output(action.step, name, output.tensors, output)
        self._record_time(action)
        await self._after_action(action.step, action.label)
        if name is not None and output is not None and not self._closed:
            for address in action.target_addresses:
                key = FrameKey(self._epoch, action.step, name)
                self._transport.send(address, key, output.reader_tensors())

    def _record_time(self, action: LaunchedAction) -> None:
        """Record when the device worked on an action, and when it copied its output. An action begins when it is
        launched or, if the device is busy then, when the one before it is done; so do copies."""
        computed, copied = self._time_of(action.computed), self._time_of(action.event)
        began = min(max(action.launched_at, self._last_computed_at), computed)
        self._state.spans.append((action.step, action.label, began, computed))
        if action.output is not None:
            copy_began = max(computed, self._last_copied_at)
            self._state.spans.append((action.step, f"{COPY_SPAN} {action.label}", copy_began, max(copy_began, copied)))
            self._last_copied_at = copied
        self._last_computed_at = computed
        self._follow_clock(action.event, copied)
        open_step = self._state.open_steps.get(action.step)
        if open_step is not None and action.work is not None:
            open_step.record_work(action.work, computed - began)
        self.actions_done += 1
        self.slowest_action_s = max(self.slowest_action_s, copied - began)

    def _time_of(self, event: DeviceEvent) -> float:
        """When a complete event was reached, on the clock of this worker."""
        return self._reference_at + event.seconds_since(self._reference)

    def _follow_clock(self, event: DeviceEvent, at: float) -> None:
        """Measure later events from a recent one: the driver gives the time between two events with 24 bits, 0.25 ms
        after an hour. The clocks of device and host differ by some parts in a million: the soonest notice of a
        completion counts as immediate."""
        self._least_delay_s = min(self._least_delay_s, self._clock.now() - at)
        if at - self._reference_at > _MAX_REFERENCE_S:
            self._reference, self._reference_at = event, at + self._least_delay_s
            self._least_delay_s = math.inf

    def close(self) -> None:
        """Send nothing any more: the epoch has ended. Launched actions still complete, and their outputs are kept."""
        self._closed = True

    async def drain(self) -> None:
        """After `close`: wait until every launched action is complete. Errors are ignored: they show again when the
        device is drained."""
        if self._completing is not None and not self._completing.done():
            await asyncio.wait([self._completing])
