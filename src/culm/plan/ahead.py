"""Plans made ahead: a case that has been planned, or one that differs from it by a renaming of pipelines, costs
nothing to plan again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from culm.plan.failures import Case, Slot
from culm.plan.greedy import Rerouted, greedy
from culm.plan.normalize import Normal, normalize, placed, spread
from culm.schedule import Action

if TYPE_CHECKING:
    from collections.abc import Sequence


_greedy = functools.lru_cache(maxsize=256)(greedy)
"""Plans are values, so that one process plans a case once, however many plan in it: a simulation has many leaders."""


class Plans:
    """The best plans of the cases asked for, each made once. `hits` and `misses` say how often that helped.

    A value of its own, not a global: who plans keeps one. `solve` makes a plan; by default the greedy one.
    """

    def __init__(self, solve: Callable[[Case], Rerouted] = _greedy) -> None:
        self._solve = solve
        self._made: dict[Case, Rerouted] = {}
        self.hits = 0
        self.misses = 0

    def best(self, case: Case) -> Rerouted:
        """The plan of a case: for exactly its failed slots."""
        order = _order(case)
        normal = replace(case, failed=frozenset(_renamed(case.failed, order)))
        if normal in self._made:
            self.hits += 1
        else:
            self.misses += 1
            self._made[normal] = self._solve(normal)
        return _back(self._made[normal], case, order)

    def normal(self, case: Case) -> tuple[Rerouted, Normal]:
        """The plan after normalization, and the moves that lead to it; without a move where moving gains nothing."""
        moved = normalize(case)
        here, there = self.best(case), self.best(replace(case, failed=moved.failed))
        if there.slots < here.slots * (1 - 1e-9):
            return there, moved
        lost = tuple(case.pipelines - len(case.live(stage)) for stage in range(case.stages))
        return here, Normal(lost, (), case.failed, here.bound)

    def ahead(self, case: Case, failures: int) -> Iterator[Rerouted]:
        """The plans for 1, 2, ... failures, each spread as well as can be: what a cluster may need next.

        Made one at a time, so that the caller can do something else in between.
        """
        for lost in range(1, failures + 1):
            yield self.best(placed(case, spread(case, lost)))

    def next(self, case: Case) -> Iterator[Rerouted]:
        """The plans for the loss of any one more worker. Losses that are the same up to names are planned once."""
        for pipeline in range(case.pipelines):
            for stage in range(case.stages):
                slot = Slot(pipeline, stage)
                if slot not in case.failed and len(case.live(stage)) > 1:
                    yield self.best(replace(case, failed=case.failed | {slot}))


def _order(case: Case) -> tuple[int, ...]:
    """The pipelines in normal order: by size, then the hurt ones last. order[i] is the pipeline that becomes i."""
    hurt: list[list[int]] = [[] for _ in case.blocks]
    for slot in sorted(case.failed):
        hurt[slot.pipeline].append(slot.stage)
    return tuple(sorted(range(case.pipelines), key=lambda d: (-len(case.blocks[d]), hurt[d], d)))


def _renamed(failed: frozenset[Slot], order: Sequence[int]) -> Iterator[Slot]:
    place = {pipeline: index for index, pipeline in enumerate(order)}
    return (Slot(place[slot.pipeline], slot.stage) for slot in failed)


def _back(found: Rerouted, case: Case, order: Sequence[int]) -> Rerouted:
    """The plan of the normal case, with the names that the pipelines and micro-batches have in this one."""
    if list(order) == sorted(order):
        return found
    P, made = case.stages, found.plan
    micro: dict[int | None, int | None] = {None: None}
    for index, pipeline in enumerate(order):
        micro.update(zip(case.blocks[index], case.blocks[pipeline], strict=True))
    slots = [order[worker // P] * P + worker % P for worker in range(len(made.workers))]
    rows = {slots[worker]: tuple(Action(s, k, micro[m]) for s, k, m in row) for worker, row in enumerate(made.workers)}
    peaks = dict(zip(slots, found.peak_activations, strict=True))
    everyone = range(len(slots))
    plan = replace(
        made, workers=tuple(rows[w] for w in everyone), failed=tuple(sorted(slots[worker] for worker in made.failed))
    )
    return replace(found, case=case, plan=plan, peak_activations=tuple(peaks[w] for w in everyone))
