"""Slow nodes: which workers take longer than their peers, what to do about it, and where their micro-batches run. Pure.

A worker's pace is the time that it computes in a step, divided by what the profile gives for the same actions: it does
not depend on how many micro-batches it runs. It is compared with the paces of the other workers of the stage, which do
the same work. A worker without such peers is compared with the workers of other stages, and with its own pace before
(UsualPaces). Medians over several steps make a hiccup irrelevant.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from culm.schedule import Plan

WINDOW_STEPS = 5
"""The least number of steps over which a pace is taken."""
_WINDOW_S = 5.0
"""The least time over which a pace is taken: which worker of a busy machine waits for a core changes within seconds."""
_MAX_WINDOW_STEPS = 512
CHANGE_S = 1.0
"""The least seconds that a change is assumed to cost: workers leave the epoch and the open steps are completed."""
PAYBACK = 2.0
"""A change has to save this many times its cost in the rest of the run."""
_SAME_FACTOR = 1.25
"""A factor that has changed by less does not lead to another plan."""
MAX_WAIT_WINDOWS = 64
Segments: TypeAlias = tuple[int, ...]
SlowVerdict: TypeAlias = Literal["keep", "share", "replace", "report"]
"""What to do: nothing, move micro-batches, replace a node, or only record that a node is slow."""


@dataclass(frozen=True)
class SlowDecision:
    """What to do about slow workers, and why."""

    verdict: SlowVerdict
    factors: Mapping[int, float]
    """By slot: how many times as long as its peers the worker takes; slots that are not slow are not listed."""
    why: str = ""
    replaced_slots: tuple[int, ...] = ()
    reported_slots: tuple[int, ...] = ()
    """Those that were found to be slow and stay as they are."""


def window_steps(step_s: float | None) -> int:
    """The number of steps over which paces are taken, for steps of this duration; None: not known yet."""
    if not step_s:
        return WINDOW_STEPS
    return min(_MAX_WINDOW_STEPS, max(WINDOW_STEPS, math.ceil(_WINDOW_S / step_s)))


@dataclass
class PaceHistory:
    """The paces of the last steps, by slot."""

    _paces: dict[int, deque[float]] = field(default_factory=dict)

    def add(self, slot: int, busy_s: float, expected_s: float) -> None:
        """Record how long a worker computed in a step, and how long the profile gives for these actions."""
        if busy_s > 0 and expected_s > 0:
            self._paces.setdefault(slot, deque(maxlen=_MAX_WINDOW_STEPS)).append(busy_s / expected_s)

    def clear(self) -> None:
        self._paces.clear()

    def medians(self, steps: int = WINDOW_STEPS) -> dict[int, float]:
        """The median pace over the last steps of each slot that has made so many."""
        return {
            slot: statistics.median(itertools.islice(reversed(each), steps))
            for slot, each in self._paces.items()
            if len(each) >= steps
        }


def slow_factors(
    paces: Mapping[int, float],
    stages: int,
    threshold: float,
    slow_before: Collection[int] = (),
    nodes: Mapping[int, int] | None = None,
) -> dict[int, float]:
    """By slot of a slow worker: how many times as long as its peers it takes.

    Peers are the workers of the same stage on other nodes; a stage without any tells nothing. A worker is slow from
    `threshold` on. One that was slow before stays so until it takes less than half of the excess (hysteresis).
    """
    found: dict[int, float] = {}
    for slot, peers in peers_by_slot(paces, stages, nodes or {}).items():
        usual = statistics.median_low([paces[at] for at in peers]) if peers else math.inf
        if paces[slot] >= _slow_limit(slot, threshold, slow_before) * usual:
            found[slot] = paces[slot] / usual
    return found


def peers_by_slot(paces: Mapping[int, float], stages: int, nodes: Mapping[int, int]) -> dict[int, list[int]]:
    """By slot whose pace is known: the others of its stage on other nodes. It takes 2 ms for 64 x 16 slots."""
    by_stage: dict[int, list[tuple[int, int]]] = {}
    for slot in paces:
        by_stage.setdefault(slot % stages, []).append((slot, nodes.get(slot, slot)))
    return {
        slot: [at for at, other in members if other != node] for members in by_stage.values() for slot, node in members
    }


def _slow_limit(slot: int, threshold: float, slow_before: Collection[int]) -> float:
    return 1 + (threshold - 1) / 2 if slot in slow_before else threshold


class UsualPaces:
    """The lowest paces of workers so far: with them, a worker that has no peers is found when it becomes slow.

    It is slow if its pace has grown by the threshold, both by itself and relative to the workers of other stages: a job
    that becomes slower as a whole slows no node, nor does a worker get slow because another one was slow before.
    A measured profile tells in addition how the paces of stages should compare: then a worker is found that was slow
    from the start. If another worker has run the same segments, its pace counts instead of the profile, which may be
    wrong about them: a node that replaces a slow one is not replaced for the same reason.
    """

    def __init__(self) -> None:
        self._own: dict[tuple[Segments, int], float] = {}
        self._relative: dict[Segments, dict[int, float]] = {}
        """By segments and worker."""

    def slow_factors(
        self,
        paces: Mapping[int, float],
        stages: int,
        threshold: float,
        runs: Mapping[int, tuple[int, Segments]],
        slow_before: Collection[int] = (),
        nodes: Mapping[int, int] | None = None,
        *,
        is_measured: bool = False,
    ) -> dict[int, float]:
        """By slot of a slow worker without peers: how many times as long as usual it takes. Records their paces.

        `runs`, by slot: the worker and the segments that it runs. `is_measured`: whether the profile was measured.
        """
        nodes = nodes or {}
        found: dict[int, float] = {}
        for slot, peers in peers_by_slot(paces, stages, nodes).items():
            others = () if peers else [at for at in paces if nodes.get(at, at) != nodes.get(slot, slot)]
            if not others or slot not in runs:
                continue
            pace, (worker, segments) = paces[slot], runs[slot]
            relative = pace / statistics.median_low([paces[at] for at in others])
            workers = self._relative.setdefault(segments, {})
            own = self._own[segments, worker] = min(pace, self._own.get((segments, worker), math.inf))
            before = min((least for each, least in workers.items() if each != worker), default=1.0)
            workers[worker] = min(relative, workers.get(worker, math.inf))
            growth = min(pace / own, relative / workers[worker])
            factor = max(growth, relative / before) if is_measured else growth
            if factor >= _slow_limit(slot, threshold, slow_before):
                found[slot] = factor
        return found


def share_micro_batches(
    plan: Plan, runners: Mapping[int, Sequence[int]], homes: Mapping[tuple[int, int], int], factors: Mapping[int, float]
) -> dict[tuple[int, int], int]:
    """By (segment, micro-batch): the slot that runs it when slow workers keep only what they can do in the time of the
    others. `homes` are the usual slots; `runners`, by stage, the slots that may run it."""
    shared = dict(homes)
    for segment in range(plan.segments):
        able = runners[segment % plan.stages]
        slow = [slot for slot in able if slot in factors]
        load = Counter(dict.fromkeys(able, 0))
        own: dict[int, list[int]] = {slot: [] for slot in slow}
        for (g, micro), slot in sorted(homes.items()):
            if g == segment and slot in load:
                load[slot] += 1
                if slot in own:
                    own[slot].append(micro)
        for slot in slow:
            targets: list[int] = []
            while len(targets) < len(own[slot]):
                target = min(able, key=lambda at: ((load[at] + 1) * factors.get(at, 1.0), at))
                if target == slot or (load[target] + 1) * factors.get(target, 1.0) >= load[slot] * factors[slot]:
                    break
                targets.append(target)
                load[slot] -= 1
                load[target] += 1
            for index, target in enumerate(
                targets
            ):  # spread over the step, so that no peer gets all of them at its end
                shared[segment, own[slot][(2 * index + 1) * len(own[slot]) // (2 * len(targets))]] = target
    return shared


def busiest_load(
    segment_s: Sequence[float], homes: Mapping[tuple[int, int], int], factors: Mapping[int, float]
) -> float:
    """How long the busiest worker computes in a step. `segment_s`: what a micro-batch takes, by segment."""
    load: dict[int, float] = {}
    for (g, _), slot in homes.items():
        load[slot] = load.get(slot, 0.0) + segment_s[g] * factors.get(slot, 1.0)
    return max(load.values(), default=0.0)


@dataclass(frozen=True, kw_only=True)
class SlowCase:
    """What a decision about slow workers depends on."""

    plan: Plan
    """With every slot filled."""
    runners: Mapping[int, Sequence[int]]
    homes: Mapping[tuple[int, int], int]
    factors: Mapping[int, float]
    """Measured now."""
    segment_s: Sequence[float]
    """What a micro-batch takes, by segment, in any unit."""
    active: Mapping[int, float]
    """Those that the current plan takes into account."""
    step_s: float
    steps_left: int
    standby: bool = False
    """Whether a node without a slot waits."""


def decide_slow_nodes(case: SlowCase) -> SlowDecision:
    """Whether to move work away from slow workers, to replace one, or to leave things as they are.

    A change must pay back twice what it costs in the rest of the run. The plan changes only if a worker has become
    slow, is no longer slow, or its factor has changed by a quarter.
    """
    keep = SlowDecision("keep", case.active)
    if not case.factors and not case.active:
        return keep
    share = partial(share_micro_batches, case.plan, case.runners, case.homes)
    now = busiest_load(case.segment_s, share(case.active), case.factors)
    shared = busiest_load(case.segment_s, share(case.factors), case.factors)
    usual = busiest_load(case.segment_s, case.homes, {})
    change_s = PAYBACK * max(CHANGE_S, case.step_s)

    def saving_s(load: float) -> float:
        return case.step_s * (1 - load / now) * case.steps_left if now else 0.0

    if case.standby and case.factors and saving_s(usual) - change_s > max(0.0, saving_s(shared)):
        slowest = max(case.factors, key=lambda slot: (case.factors[slot], -slot))
        usual_work = "its peers" if len(case.runners[slowest % case.plan.stages]) > 1 else "usual"
        why = f"it takes {case.factors[slowest]:.1f} times as long as {usual_work}, and another node waits for a slot"
        return SlowDecision("replace", case.active, why, (slowest,))
    if _same_factors(case.factors, case.active):
        return keep
    if saving_s(shared) < change_s:
        return _report(case)
    if not case.factors:
        return SlowDecision("share", {}, "no node is slow any more: each runs its own micro-batches again")
    why = (
        f"{_factor_text(case.factors)} as its peers: they run a part of its micro-batches, which makes steps "
        f"{1 - shared / now:.0%} shorter"
    )
    return SlowDecision("share", dict(case.factors), why)


def _report(case: SlowCase) -> SlowDecision:
    """Record slow workers whose work no other worker can do, if they have changed. Nothing else is done."""

    def alone(factors: Mapping[int, float]) -> dict[int, float]:
        return {slot: each for slot, each in factors.items() if len(case.runners[slot % case.plan.stages]) == 1}

    before, now = alone(case.active), alone(case.factors)
    if _same_factors(before, now):
        return SlowDecision("keep", case.active)
    shared = {slot: factor for slot, factor in case.active.items() if slot not in before}
    why = f"{_factor_text(now)} as usual; no other node runs their stages, and none waits for a slot"
    return SlowDecision("report", shared | now, why if now else "no node is slow any more", reported_slots=tuple(now))


def _factor_text(factors: Mapping[int, float]) -> str:
    return ", ".join(f"slot {slot} takes {factor:.1f} times as long" for slot, factor in sorted(factors.items()))


def _same_factors(one: Mapping[int, float], other: Mapping[int, float]) -> bool:
    return one.keys() == other.keys() and all(
        max(factor, other[slot]) < _SAME_FACTOR * min(factor, other[slot]) for slot, factor in one.items()
    )
