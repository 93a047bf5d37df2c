"""Evaluation schedule: after which steps a run evaluates whose interval is a time. Pure.

The leader chooses each of these steps once, before any worker has begun it, and names it to the workers and in every
later epoch. Its snapshot has the chosen steps, so that a step which is run again is evaluated again.
"""

from __future__ import annotations


class EvaluationSchedule:
    """The evaluations of a run, by the number of completed steps before them."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the time from one evaluation to the next; 0: evaluations do not depend on time."""
        self._seconds = seconds
        self.chosen: set[int] = set()
        """Every evaluation that was chosen, past and open."""
        self._counts_from: float | None = None
        """When training began or the last evaluation was committed; None: it has not begun."""

    def start(self, now: float) -> None:
        """Count from now on, unless that was begun before."""
        if self._counts_from is None:
            self._counts_from = now

    def record(self, now: float) -> None:
        """An evaluation was committed: the time to the next one begins."""
        self._counts_from = now

    def choose(self, now: float, committed_steps: int, first_free_step: int, end_step: int) -> int | None:
        """Choose the next evaluation if its time has come: the steps completed before it. None: it is not due, one is
        open already, or the run ends before.

        `first_free_step`: the first step that no worker has begun; the evaluation follows it.
        """
        if not self._seconds or self._counts_from is None or now - self._counts_from < self._seconds:
            return None
        if self.next_after(committed_steps) is not None or first_free_step >= end_step:
            return None
        self.chosen.add(first_free_step + 1)
        return first_free_step + 1

    def next_after(self, committed_steps: int) -> int | None:
        """The next chosen evaluation that is not committed; None: there is none."""
        return min((each for each in self.chosen if each > committed_steps), default=None)

    def waited_s(self, now: float) -> float | None:
        """Seconds since the time to the next evaluation began; None: it has not begun."""
        return None if self._counts_from is None else now - self._counts_from

    def restore(self, chosen: tuple[int, ...], waited_s: float | None, now: float) -> None:
        """Continue the schedule of the previous leader, whose clock may differ."""
        self.chosen.clear()
        self.chosen.update(chosen)
        self._counts_from = None if waited_s is None else now - waited_s
