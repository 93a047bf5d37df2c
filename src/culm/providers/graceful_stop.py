"""Graceful stop: end an interrupted run at the next step boundary, so that its checkpoint is written first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from culm.observe.writers.run_folder import saved_checkpoint_steps

if TYPE_CHECKING:
    from culm.providers.run_handle import RunHandle

_REPEAT_S = 0.2
"""A signal that follows within this time is the same request: `timeout` and terminals send it twice."""


class GracefulStop:
    """Receives interrupts of a run. The first one ends the run at a step boundary, if that saves anything."""

    def __init__(self, on_line: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        """`on_line` is called with a sentence about what happens."""
        self._on_line, self._now = on_line, now
        self._run: RunHandle | None = None
        self._requested_at: float | None = None

    def attach(self, run: RunHandle) -> None:
        """Interrupts concern this run from now on."""
        self._run = run

    @property
    def requested(self) -> bool:
        """Whether the run was asked to end at a step boundary."""
        return self._requested_at is not None

    def request(self, reason: str = "interrupted", hint: str = "; press Ctrl-C again to exit at once") -> bool:
        """Handle an interrupt. False: the run must be ended at once, because nothing can be saved or because this is
        the second interrupt. `reason` and `hint` begin and end the sentence about it."""
        if self._requested_at is not None:
            return self._now() - self._requested_at < _REPEAT_S
        run = self._run
        if run is None or run.setup.out is None or run.steps_done is None or run.has_ended:
            return False
        self._requested_at = self._now()
        self._on_line(f"{reason}: writing a checkpoint at the next step boundary (step {run.steps_done} is done){hint}")
        run.finish_at_next_step()
        return True


def interrupted_message(out: str | None) -> str:
    """What an interrupted run has saved, and how to continue it."""
    steps = saved_checkpoint_steps(out) if out is not None else []
    if steps:
        return f"interrupted; {steps[-1]} steps are saved: continue with --resume {out}"
    if out is not None:
        return f"interrupted before the first checkpoint was written to {out}"
    return "interrupted before the first checkpoint: with --out FOLDER a run writes one when it is interrupted"
