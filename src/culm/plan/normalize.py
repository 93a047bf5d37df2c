"""Failure normalization: how failures are best spread over the stages, and who moves to get there.

Two failures in one stage cost far more than two in different stages. A worker that takes the layers of another stage
from a peer there moves a failure from that stage to its own, so the survivors may choose where the holes are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from culm.errors import PlanError
from culm.plan.bound import stage_bound
from culm.plan.failures import Slot
from culm.plan.partition import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from culm.plan.failures import Case

Spread: TypeAlias = tuple[int, ...]
"""How many workers each stage has lost."""

_Worth: TypeAlias = tuple[float, ...]
_Price: TypeAlias = Callable[[int, int], _Worth]
"""(stage, failures there) -> what that costs; an empty tuple where it is out of the question."""
_Join: TypeAlias = Callable[[_Worth, _Worth], _Worth]

_SAME = 1 + 1e-9


class Move(NamedTuple):
    """The worker of slot `source` leaves it empty and fills `target`, whose layers it takes from a peer there."""

    source: Slot
    target: Slot


@dataclass(frozen=True)
class Normal:
    """The failures where they hurt least."""

    spread: Spread
    moves: tuple[Move, ...]
    """The fewest that lead there; each costs the state of one stage."""
    failed: frozenset[Slot]
    """The empty slots after the moves."""
    bound: float
    """No step with that spread is shorter; and with any other spread it is no lower."""


def normalize(case: Case) -> Normal:
    """The failed slots of a case, moved to where the step can be shortest, with the fewest moves that do it."""
    lost = spread_of(case.failed, case.stages)
    best = spread(case, sum(lost), near=lost)
    moves = _moves(case, lost, best)
    left = case.failed.difference(move.target for move in moves).union(move.source for move in moves)
    return Normal(best, moves, frozenset(left), _bound(case, best))


def spread(case: Case, failures: int, *, near: Sequence[int] | None = None) -> Spread:
    """How so many failures are best spread, at most D - 1 a stage: first for the step, by its bound.

    Among equals that which is reached with the fewest moves from the spread `near`, then the most even. Of the case
    all is read but the failed slots. Raises PlanError when there are more failures than stages can lose.
    """
    _check(case, failures)
    start = tuple(near or (0,) * case.stages)

    @cache
    def step(stage: int, lost: int) -> _Worth:
        return (stage_bound(_hurt(case, stage, lost), stage),)

    shortest, _ = _cheapest(case, failures, step, max)

    def effort(stage: int, lost: int) -> _Worth:
        within = step(stage, lost)[0] <= shortest[0] * _SAME
        return (max(0, lost - start[stage]) if near else 0, lost * lost) if within else ()

    return _cheapest(case, failures, effort, _added)[1]


def spread_of(failed: Iterable[Slot], stages: int) -> Spread:
    """How many of the slots are in each stage."""
    lost = Counter(slot.stage for slot in failed)
    return tuple(lost[stage] for stage in range(stages))


def placed(case: Case, lost: Sequence[int]) -> Case:
    """The case with so many failures in each stage, all of them in the last pipelines: the one to plan ahead for."""
    D = case.pipelines
    return replace(case, failed=frozenset(Slot(D - 1 - n, s) for s, many in enumerate(lost) for n in range(many)))


def _cheapest(case: Case, failures: int, price: _Price, join: _Join) -> tuple[_Worth, Spread]:
    """A dynamic program from the last stage back: ahead[n] is the best way to place n failures behind the stage."""
    ahead: dict[int, tuple[_Worth, Spread]] = {0: ((-math.inf,), ())} if join is max else {0: ((0, 0), ())}
    for stage in reversed(range(case.stages)):
        best: dict[int, tuple[_Worth, Spread]] = {}
        for lost in range(min(failures, case.pipelines - 1) + 1):
            alone = price(stage, lost)
            for behind, (worth, chosen) in ahead.items() if alone else ():
                found = (join(alone, worth), (lost, *chosen))
                if lost + behind <= failures and (lost + behind not in best or found < best[lost + behind]):
                    best[lost + behind] = found
        ahead = best
    return ahead[failures]


def _added(one: _Worth, other: _Worth) -> _Worth:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _hurt(case: Case, stage: int, lost: int) -> Case:
    return placed(case, [lost if s == stage else 0 for s in range(case.stages)])


def _bound(case: Case, lost: Sequence[int]) -> float:
    return max(stage_bound(_hurt(case, stage, many), stage) for stage, many in enumerate(lost))


def _moves(case: Case, lost: Sequence[int], best: Sequence[int]) -> tuple[Move, ...]:
    """Out of stages that can spare a worker into the failed slots of those that can not.

    Workers leave the pipelines that have lost the most: what is left is as many whole pipelines as can be.
    """
    hurt = Counter(slot.pipeline for slot in case.failed)

    def worst_first(slot: Slot) -> tuple[int, Slot]:
        return -hurt[slot.pipeline], slot

    givers: list[Slot] = []
    takers: list[Slot] = []
    for stage in range(case.stages):
        change = best[stage] - lost[stage]
        alive = [Slot(pipeline, stage) for pipeline in case.live(stage)]
        givers += sorted(alive, key=worst_first)[: max(0, change)]
        holes = sorted((slot for slot in case.failed if slot.stage == stage), key=worst_first, reverse=True)
        takers += holes[: max(0, -change)]
    return tuple(Move(giver, taker) for giver, taker in zip(givers, takers, strict=True))


def _check(case: Case, failures: int) -> None:
    most = case.stages * (case.pipelines - 1)
    if not 0 <= failures <= most:
        raise PlanError(
            f"failures is {failures}: {count(case.stages, 'stage')} on {count(case.pipelines, 'pipeline')} can lose "
            f"0 to {most} workers, as each stage needs one that holds its layers"
        )
