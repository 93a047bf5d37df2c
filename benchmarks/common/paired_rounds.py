"""Measure two sides in alternation, so that drift of the machine affects both.

The ratio of a round is b's seconds divided by a's: above 1, a is faster.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

from culm.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

RESAMPLES = 2000


class TimedSide(Protocol):
    """One system, set up, and idle between rounds."""

    def run_round(self, steps: int) -> float:
        """Train that many steps and return the seconds from the start until the last worker has finished."""


@dataclass(frozen=True, kw_only=True)
class PairedComparison:
    """The results of the rounds; seconds are per step, one for each round."""

    ratio_median: float
    ci: tuple[float, float]
    """95 % bootstrap interval of the median ratio."""
    ratios: tuple[float, ...]
    a_s: tuple[float, ...]
    b_s: tuple[float, ...]


def measure_paired(a: TimedSide, b: TimedSide, *, rounds: int, steps: int, warmup: int) -> PairedComparison:
    """Run both sides `rounds` times in the order AB BA BA AB ..., after `warmup` steps of each that do not count."""
    for name, value, minimum in (("rounds", rounds, 1), ("steps", steps, 1), ("warmup", warmup, 0)):
        if value < minimum:
            raise UsageError(f"{name} is {value}: use a whole number of at least {minimum}")
    if warmup:
        a.run_round(warmup)
        b.run_round(warmup)
    seconds = [_time_both(a, b, a_first=first, steps=steps) for first in round_order(rounds)]
    return compare_rounds([s for s, _ in seconds], [s for _, s in seconds])


def compare_rounds(a_s: Sequence[float], b_s: Sequence[float]) -> PairedComparison:
    """Compare seconds that were measured round by round."""
    ratios = tuple(b / a for a, b in zip(a_s, b_s, strict=True))
    return PairedComparison(
        ratio_median=median(ratios), ci=median_interval(ratios), ratios=ratios, a_s=tuple(a_s), b_s=tuple(b_s)
    )


def round_order(rounds: int) -> list[bool]:
    """Whether a goes first in each round: ABBA BAAB and so on (Thue-Morse), which cancels linear drift and more."""
    return [number.bit_count() % 2 == 0 for number in range(rounds)]


def median_interval(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the median. Deterministic: the same values and seed give the same interval."""
    rng = random.Random(seed)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - level) / 2
    return medians[math.floor(tail * (RESAMPLES - 1))], medians[math.ceil((1 - tail) * (RESAMPLES - 1))]


def steps_for(step_s: float, *, round_s: float) -> int:
    """The number of steps that makes a round last about `round_s`; at least one."""
    return max(1, round(round_s / step_s))


def _time_both(a: TimedSide, b: TimedSide, *, a_first: bool, steps: int) -> tuple[float, float]:
    if a_first:
        a_s = a.run_round(steps)
        b_s = b.run_round(steps)
    else:
        b_s = b.run_round(steps)
        a_s = a.run_round(steps)
    return a_s / steps, b_s / steps
