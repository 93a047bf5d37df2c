"""Timed steps: after which steps a run evaluates or saves, where the interval is a time. Pure.

The leader chooses each of these steps once, before any worker has begun it, and names it to the workers and in every
later epoch. Its snapshot has the chosen steps, so that the next leader and a step which is run again know them.
"""

from __future__ import annotations


class TimedSteps:
    """The evaluations or checkpoints of a run, by the number of completed steps before them."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the time from one to the next; 0: they do not depend on time."""
        self._seconds = seconds
        self.chosen: set[int] = set()
        """Every one that was chosen, past and open."""
        self._counts_from: float | None = None
        """When training began or the last one was recorded; None: it has not begun."""

    def start(self, now: float) -> None:
        """Count from now on, unless that was begun before."""
        if self._counts_from is None:
            self._counts_from = now

    def record(self, now: float) -> None:
        """One is complete: the time to the next one begins."""
        self._counts_from = now

    def choose(self, now: float, committed_steps: int, first_free_step: int, end_step: int) -> int | None:
        """Choose the next one if its time has come: the steps completed before it. None: it is not due, one is open
        already, or the run ends before.

        `first_free_step`: the first step that no worker has begun; the chosen one follows it.
        """
        if not self._seconds or self._counts_from is None or now - self._counts_from < self._seconds:
            return None
        if self.next_after(committed_steps) is not None or first_free_step >= end_step:
            return None
        self.chosen.add(first_free_step + 1)
        return first_free_step + 1

    def next_after(self, committed_steps: int) -> int | None:
        """The next chosen one that is not committed; None: there is none."""
        return min((each for each in self.chosen if each > committed_steps), default=None)

    def from_step(self, step: int) -> tuple[int, ...]:
        """The chosen ones from a number of completed steps on, rising."""
        return tuple(sorted(each for each in self.chosen if each >= step))

    def forget_before(self, step: int) -> None:
        """Forget the chosen ones before a number of completed steps, except for the last of them."""
        last = max((each for each in self.chosen if each < step), default=step)
        self.chosen.intersection_update({last, *self.from_step(step)})

    def waited_s(self, now: float) -> float | None:
        """Seconds since the time to the next one began; None: it has not begun."""
        return None if self._counts_from is None else now - self._counts_from

    def restore(self, chosen: tuple[int, ...], waited_s: float | None, now: float) -> None:
        """Continue what the previous leader has begun, whose clock may differ."""
        self.chosen.clear()
        self.chosen.update(chosen)
        self._counts_from = None if waited_s is None else now - waited_s
