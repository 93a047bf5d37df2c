"""Two sides measured in alternation, so that a machine that drifts drifts for both.

The ratio of a round is b's seconds over a's: above 1, a is the faster one.
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


class Side(Protocol):
    """One system, set up and idle between rounds."""

    def round(self, steps: int) -> float:
        """Train that many steps and return the seconds from the word go to the last worker's end."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the rounds showed; seconds are per step, one for each round."""

    ratio_median: float
    ci: tuple[float, float]
    """95 % bootstrap interval of the median ratio."""
    ratios: tuple[float, ...]
    a_s: tuple[float, ...]
    b_s: tuple[float, ...]


def paired(a: Side, b: Side, *, rounds: int, steps: int, warmup: int) -> Comparison:
    """Run both sides `rounds` times in the order AB BA BA AB ..., after `warmup` steps of each that do not count."""
    for name, value, least in (("rounds", rounds, 1), ("steps", steps, 1), ("warmup", warmup, 0)):
        if value < least:
            raise UsageError(f"{name} is {value}: use a whole number of at least {least}")
    if warmup:
        a.round(warmup)
        b.round(warmup)
    seconds = [_both(a, b, a_first=first, steps=steps) for first in order(rounds)]
    return compare([s for s, _ in seconds], [s for _, s in seconds])


def compare(a_s: Sequence[float], b_s: Sequence[float]) -> Comparison:
    """The comparison of seconds that were measured round by round."""
    ratios = tuple(theirs / ours for ours, theirs in zip(a_s, b_s, strict=True))
    return Comparison(ratio_median=median(ratios), ci=interval(ratios), ratios=ratios, a_s=tuple(a_s), b_s=tuple(b_s))


def order(rounds: int) -> list[bool]:
    """Whether a goes first in each round: ABBA BAAB and so on (Thue-Morse), which cancels linear drift and more."""
    return [number.bit_count() % 2 == 0 for number in range(rounds)]


def interval(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the median: the same values and seed always give the same interval."""
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    tail = (1 - level) / 2
    return medians[math.floor(tail * (RESAMPLES - 1))], medians[math.ceil((1 - tail) * (RESAMPLES - 1))]


def steps_for(step_s: float, *, round_s: float) -> int:
    """Steps that make a round last about `round_s`; never fewer than one."""
    return max(1, round(round_s / step_s))


def _both(a: Side, b: Side, *, a_first: bool, steps: int) -> tuple[float, float]:
    if a_first:
        ours = a.round(steps)
        theirs = b.round(steps)
    else:
        theirs = b.round(steps)
        ours = a.round(steps)
    return ours / steps, theirs / steps
