"""Monitors: which evaluation is the best, and when evaluations stop improving. Pure, imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from culm.errors import JobError

MonitorMode: TypeAlias = Literal["min", "max"]


class EvaluationInterval(NamedTuple):
    """How often a run evaluates: after this many steps, or after this many seconds. Both are 0: never."""

    steps: int = 0
    seconds: float = 0.0

    def is_due_by_count(self, completed_steps: int) -> bool:
        """Whether an evaluation is due after this many steps, if it does not depend on time."""
        return bool(self.steps) and completed_steps % self.steps == 0


@dataclass(frozen=True)
class Monitor:
    """Names the value of evaluations that decides which checkpoint is the best, and whether less or more is better."""

    name: str = "eval_loss"
    """eval_loss, or eval_NAME for a value NAME of Job.metrics."""
    mode: MonitorMode = "min"

    def __post_init__(self) -> None:
        if self.mode not in get_args(MonitorMode):
            raise JobError(f"culm.{type(self).__name__} has mode={self.mode!r}: use min or max")

    def is_better(self, value: float, than: float, margin: float = 0.0) -> bool:
        """Whether a value is better than another one by more than `margin`. NaN is never better."""
        if math.isnan(value) or math.isnan(than):
            return math.isnan(than) and not math.isnan(value)
        return value < than - margin if self.mode == "min" else value > than + margin

    def best_step(self, history: Mapping[int, float]) -> int | None:
        """The first step with the best value; None: there is no evaluation yet."""
        best: int | None = None
        for step in sorted(history):
            if best is None or self.is_better(history[step], history[best]):
                best = step
        return best

    def decisive_steps(self, history: Mapping[int, float]) -> set[int]:
        """The evaluations that later decisions depend on."""
        best = self.best_step(history)
        return set() if best is None else {best}


@dataclass(frozen=True)
class EarlyStop(Monitor):
    """Ends the run after `patience` evaluations in a row without an improvement on the best value by `min_delta`."""

    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.patience, int) or self.patience < 1:
            raise JobError(f"culm.EarlyStop has patience={self.patience!r}: use a whole number of at least 1")
        if not self.min_delta >= 0:
            raise JobError(f"culm.EarlyStop has min_delta={self.min_delta!r}: use a number of at least 0")

    def is_exhausted(self, history: Mapping[int, float]) -> bool:
        """Whether the last `patience` evaluations brought no improvement."""
        improved = self._last_improvement(history)
        return sum(improved is None or step > improved for step in history) >= self.patience

    def decisive_steps(self, history: Mapping[int, float]) -> set[int]:
        """The last improvement and what came after it."""
        improved = self._last_improvement(history)
        return {step for step in history if improved is None or step >= improved}

    def _last_improvement(self, history: Mapping[int, float]) -> int | None:
        """The last step with a value that was better than the best one before; None: there is none."""
        best, improved = math.nan, None
        for step in sorted(history):
            if self.is_better(history[step], best, self.min_delta):
                best, improved = history[step], step
        return improved


def to_monitor(declared: str | Monitor) -> Monitor:
    """The monitor that a job declares by a name or an object. A name alone means the smallest value."""
    return Monitor(declared) if isinstance(declared, str) else declared
