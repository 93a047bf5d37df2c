"""Hook calls: the line of a step waits for the values of the on_step hook, and is written exactly once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from culm.cluster.leader.events import HookTimer, StartHook
from culm.cluster.leader.output.hook_runner import HookResult, decode_hook_result
from culm.cluster.run_setup import encode

if TYPE_CHECKING:
    from culm.cluster.leader.leader_state import LeaderState
    from culm.observe.step_metrics import StepMetrics

SLOW_HOOK_S = 10.0
"""A hook that takes longer is reported; again after twice the time, and so on."""
DEFAULT_TIMEOUT_S = 60.0
"""How long a step waits for its hook where the run sets no limit."""


class HookCalls:
    """Calls the hook after each commit, or waits for the launcher to do so, without blocking the leader.

    The step is committed before the call. Its metrics are in the leader's snapshot until the next commit, so that
    another leader can write the line if this one is lost. It does not call the hook again: it takes the result from the
    store, or writes the line without values if there is none.
    """

    def __init__(self, state: LeaderState) -> None:
        self.state = state
        self._early_result: HookResult | None = None
        """A result that arrived before this leader knew which steps are committed."""
        self._gave_up = False
        """Whether the hook is not called any more, because its process has ended."""
        self._late_step: int | None = None
        """The step whose hook has not returned in time. No other step calls the hook meanwhile."""

    def begin_step(self, metrics: StepMetrics) -> None:
        """A step is complete. Its line becomes the pending one."""
        state = self.state
        if state.setup.waits_for_hook:
            if state.pending_line is not None:  # it was permitted although no result arrived for the step before
                self._write_line(HookResult(state.pending_line.step))
            state.pending_line = metrics

    def call_hook(self, metrics: StepMetrics) -> None:
        """A step is committed: call the hook if it runs beside the leader."""
        gate = self.state.setup.gate
        if gate == "hook" and not self._gave_up and self._late_step is None:
            self.state.emit(StartHook(metrics))
        elif gate == "hook":
            self.handle_result(HookResult(metrics.step))
        if self.state.pending_line is metrics:
            self._start_timer(metrics.step, self.state.now, SLOW_HOOK_S)

    def handle_result(self, result: HookResult) -> None:
        """The hook has returned for the pending step: write its line, then permit the next step or end the run. Raises
        the error of a hook that raised."""
        state = self.state
        if not state.commits_confirmed:
            self._early_result = result
            return
        if result.step == self._late_step:
            self._handle_late_result(result)
            return
        if state.pending_line is None or state.pending_line.step != result.step:
            return
        if result.gave_up:
            self._gave_up = True
            state.log_event("hook_failed", name="on_step", step=result.step, why=result.gave_up)
        if state.setup.gate == "hook":
            state.put_key("hook", encode(result))  # the next leader does not call the hook again
        self._write_line(result)
        result.raise_if_failed()
        if result.stopped:
            state.log_event("stopped", step=result.step, why="on_step returned STOP")
            state.end_before_step(result.step + 1)
        elif state.setup.gate == "hook" and result.step + 1 < state.setup.steps:
            state.permit_steps(result.step + 2)

    def _handle_late_result(self, result: HookResult) -> None:
        """A hook has returned after its line was written. Its values are lost. It may still end the run, before a step
        that no worker has begun. Raises the error of a hook that raised."""
        state, self._late_step = self.state, None
        if result.gave_up:
            self._gave_up = True
            state.log_event("hook_failed", name="on_step", step=result.step, why=result.gave_up)
            return
        state.log_event("hook_returned", name="on_step", step=result.step)
        result.raise_if_failed()
        if result.stopped and state.end_step is None:
            why = f"on_step returned STOP for step {result.step}, after its time was over"
            state.log_event("stopped", step=state.earliest_end_step - 1, why=why)
            state.end_before_step(state.earliest_end_step)

    def _write_line(self, result: HookResult) -> None:
        state, pending = self.state, self.state.pending_line
        assert pending is not None
        state.pending_line = None
        metrics = pending.with_values(result.values)
        state.write_step(metrics)
        if state.setup.gate == "hook":
            state.show_step(metrics)

    def resolve_previous_line(self) -> None:
        """Another node was the leader. Write the line that waited for a hook, if the hook has returned. If it ran
        beside the previous leader and its result is not in the store, it ended with that leader."""
        state, pending = self.state, self.state.pending_line
        if pending is None:
            return
        early, self._early_result = self._early_result, None
        if early is not None and early.step == pending.step:
            self.handle_result(early)
        elif state.setup.gate == "hook":
            found = HookResult(-1)
            if state.previous_hook_result is not None:
                found = decode_hook_result(state.previous_hook_result)
            self.handle_result(found if found.step == pending.step else HookResult(pending.step))
        else:
            self._start_timer(pending.step, state.now, SLOW_HOOK_S)

    def _start_timer(self, step: int, started_at: float, pause: float) -> None:
        """Check the hook after `pause` seconds, or when its time is over."""
        left = started_at + self._timeout_s - self.state.now
        self.state.start_timer(max(0.0, min(pause, left)), HookTimer(step, started_at, pause))

    @property
    def _timeout_s(self) -> float:
        setup = self.state.setup
        if setup.gate != "hook":
            return math.inf
        return DEFAULT_TIMEOUT_S if setup.hook_timeout is None else setup.hook_timeout

    def handle_timer(self, timer: HookTimer) -> None:
        """Report a hook that has not returned. After its timeout, continue without waiting for it."""
        state, waited = self.state, self.state.now - timer.started_at
        if state.pending_line is None or state.pending_line.step != timer.step:
            return
        if waited >= self._timeout_s:
            why = f"it did not return within {self._timeout_s:g} s: the run continues, and does not call it before that"
            state.log_event("hook_failed", name="on_step", step=timer.step, why=why)
            self.handle_result(HookResult(timer.step))
            self._late_step = timer.step
            return
        state.log_event("hook_slow", name="on_step", step=timer.step, seconds=round(waited, 3))
        self._start_timer(timer.step, timer.started_at, 2 * timer.pause)
