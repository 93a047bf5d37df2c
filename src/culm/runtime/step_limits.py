"""What the leader and a worker have agreed on about steps: permitted, committed, reported. Outlives epochs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from culm.runtime.epoch import Epoch
    from culm.runtime.worker_state import WorkerState


class StepLimits:
    """How far a worker may run, which steps are committed, and which ones it has reported."""

    def __init__(self) -> None:
        self.permitted_until = 0
        """Steps below this number may run."""
        self.committed_steps = 0
        """Steps below this number are committed."""
        self.end_step: int | None = None
        """The step before which the run ends, once that is decided."""
        self.evaluations: set[int] = set()
        """Evaluations that the leader has chosen by time: the steps completed before each."""
        self.checkpoints: set[int] = set()
        """The same for checkpoints."""
        self.update_event = asyncio.Event()
        """Set after every message of the leader. A waiting coroutine clears it before it checks the limits."""
        self._drain_limit = (0, 0)
        """(epoch, step): in that epoch no step from this one on is begun."""
        self._reported_until = (0, 0)
        """(epoch, step): the first step that was not reported to the leader in the epoch."""

    def notify(self) -> None:
        """Wake the training loop, so that it checks the limits again."""
        self.update_event.set()

    def permit(self, end_step: int) -> None:
        """Permit all steps below `end_step`. A permit is never taken back."""
        self.permitted_until = max(self.permitted_until, end_step)

    def drain(self, epoch: int, stop_before: int) -> None:
        """In this epoch begin no step from `stop_before` on."""
        self._drain_limit = epoch, stop_before

    def end_run(self, end_step: int) -> None:
        """The run ends before `end_step`."""
        self.end_step = end_step

    def set_timed_steps(self, evaluations: Iterable[int], checkpoints: Iterable[int]) -> None:
        """An epoch begins, with these evaluations and checkpoints."""
        self.evaluations, self.checkpoints = set(evaluations), set(checkpoints)

    def evaluate_after(self, completed_steps: int) -> None:
        """The leader has chosen another evaluation in this epoch."""
        self.evaluations.add(completed_steps)

    def save_after(self, completed_steps: int) -> None:
        """The leader has chosen another checkpoint in this epoch."""
        self.checkpoints.add(completed_steps)

    def restart(self, committed_steps: int) -> None:
        """Set the number of committed steps, which may be lower than before: the layers are built or loaded again. The
        leader permits steps again when all workers are ready."""
        self.committed_steps, self.permitted_until = committed_steps, 0

    def commit(self, steps: int, state: WorkerState | None) -> None:
        """All steps below `steps` are committed: drop what `state` keeps for them."""
        self.committed_steps = max(self.committed_steps, steps)
        if state is not None:
            state.drop_committed(self.committed_steps - 1)

    def ends_before(self, step: int) -> bool:
        """Whether the run ends before a step."""
        return self.end_step is not None and step >= self.end_step

    def may_run(self, epoch: Epoch, step: int) -> bool:
        """Whether the leader permits the step in this epoch."""
        return step < self.permitted_until and not self._is_draining(epoch, step)

    def _is_draining(self, epoch: Epoch, step: int) -> bool:
        """Whether a step must not be begun in this epoch, because the next epoch has another shape."""
        number, stop_before = self._drain_limit
        return (number == epoch.number and step >= stop_before) or (
            epoch.stop_before is not None and step >= epoch.stop_before
        )

    def mark_reported(self, epoch: Epoch, step: int) -> None:
        """A step was reported in this epoch."""
        self._reported_until = epoch.number, step + 1

    def reported_until(self, epoch: Epoch) -> int:
        """Steps below this number need no report in this epoch. In a new epoch uncommitted steps are reported again,
        because the leader may be another one."""
        number, steps = self._reported_until
        return max(steps if number == epoch.number else 0, self.committed_steps)
