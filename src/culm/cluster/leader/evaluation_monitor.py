"""Evaluation monitor: when evaluations end the run, and which checkpoint is the best one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from culm.monitor import EarlyStop, Monitor


class BestEvaluation(NamedTuple):
    """The best evaluation so far: the steps completed before it, and the value it was chosen by."""

    completed_steps: int
    name: str
    value: float


class EvaluationMonitor:
    """Applies Job.early_stop and Job.keep_best to the values of all evaluations, by step."""

    def __init__(self, early_stop: EarlyStop | None, keep_best: Monitor | None) -> None:
        self._early_stop, self._keep_best = early_stop, keep_best

    def stop_reason(self, values: Mapping[int, Mapping[str, float]]) -> str | None:
        """Why the run ends now; None: it goes on."""
        rule = self._early_stop
        if rule is None or not rule.is_exhausted(_history(rule, values)):
            return None
        return f"{rule.name} has not improved for {rule.patience} evaluations"

    def best(self, values: Mapping[int, Mapping[str, float]]) -> BestEvaluation | None:
        """The best evaluation so far; None: there is none, or the job keeps no best checkpoint."""
        if self._keep_best is None:
            return None
        history = _history(self._keep_best, values)
        step = self._keep_best.best_step(history)
        return None if step is None else BestEvaluation(step + 1, self._keep_best.name, history[step])

    def decisive_values(self, values: Mapping[int, Mapping[str, float]], before: int) -> dict[int, dict[str, float]]:
        """The evaluations of steps below `before` that later decisions depend on: they are in the checkpoint."""
        copied = tuple(values.items())  # another thread may add to it
        earlier = {step: named for step, named in copied if step < before}
        found: dict[int, dict[str, float]] = {}
        for monitor in filter(None, (self._early_stop, self._keep_best)):
            history = _history(monitor, earlier)
            for step in monitor.decisive_steps(history):
                found.setdefault(step, {})[monitor.name] = history[step]
        return found

    def summary_fields(self, values: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
        """The best evaluation for summary.json; empty if the job keeps no best checkpoint."""
        best = self.best(values)
        return {} if best is None else {"best": best._asdict()}

    @property
    def may_end_the_run(self) -> bool:
        """Whether an evaluation may end the run: no worker may be past it by then."""
        return self._early_stop is not None


def _history(monitor: Monitor, values: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    return {step: named[monitor.name] for step, named in values.items() if monitor.name in named}
