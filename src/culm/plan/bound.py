"""How short a step could be at best, in closed form: the work of the busiest worker, and the ways to it and back."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from culm.schedule import Kind

if TYPE_CHECKING:
    from culm.plan.failures import Case


def bound(case: Case) -> float:
    """No plan of the case takes fewer slots a step. Some cases need more: with little memory above all."""
    return max(stage_bound(case, stage) for stage in range(case.stages))


def stage_bound(case: Case, stage: int) -> float:
    """What the busiest worker of one stage asks for.

    Its first forward has come down through the stages before, and its last backward goes back up through them. Under
    the staggered optimizer a step is as long as the longest window of a stage, from its first F to its last W: the
    way down counts only from the stage whose window it is.
    """
    start, back = _way_down(case), _way_up(case)
    until, whole = _work(case, stage)
    finish = [case.prices[Kind.R][s] + case.prices[Kind.S][s] for s in range(case.stages)]
    last = [case.prices[Kind.W][s] if case.split else 0.0 for s in range(case.stages)]
    begin = [start[stage] - (start[s] if case.stagger else 0.0) for s in range(case.stages)]
    above = [begin[s] + until + back[stage] - back[s] + last[s] + finish[s] for s in range(stage)]
    return max([begin[stage] + whole + finish[stage], *above])


def _way_down(case: Case) -> list[float]:
    """When the first forward can reach each stage."""
    forward = case.prices[Kind.F]
    return list(accumulate((forward[s] + case.sends[s] for s in range(case.stages - 1)), initial=0.0))


def _way_up(case: Case) -> list[float]:
    """From the end of a backward of each stage to the end of the same in stage 0."""
    backward = case.prices[case.backward]
    return list(accumulate((case.sends[s] + backward[s] for s in range(case.stages - 1)), initial=0.0))


def _work(case: Case, stage: int) -> tuple[float, float]:
    """How long the busiest worker takes at least, from its first F to the end of its last I (or B), and of all.

    Until a micro-batch has been to the last stage and back there is nothing but F to do, as many as the memory holds.
    With c activations at most, all W but c come before the last F, and so before the last I. And as no more than c
    are alive at once, n of them take as many lives, one after the other, as there are c in n.
    """
    forward, backward = case.prices[Kind.F], case.prices[case.backward]
    weight = case.prices[Kind.W][stage] if case.split else 0.0
    n = case.load(stage)
    c = min(n, case.cap(stage))
    trip = sum(forward[stage:]) + sum(backward[stage + 1 :]) + 2 * sum(case.sends[stage:])
    life = trip + backward[stage] + weight
    until = max(c * forward[stage], trip) + (n - c) * (forward[stage] + weight) + n * backward[stage]
    lives = -(-n // c) * life
    return max(until, lives - weight), max(until + c * weight, lives)
