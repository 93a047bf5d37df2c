"""Lower bound of the step time in closed form: the work of the busiest worker plus the path to it and back."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from culm.schedule import Kind

if TYPE_CHECKING:
    from culm.plan.replan.plan_case import PlanCase


def step_lower_bound(case: PlanCase) -> float:
    """No plan of the case takes less time per step. Some cases need more, mainly those with little memory."""
    paths = _Paths.of_case(case)
    return max(_stage_lower_bound(case, paths, stage) for stage in range(case.stages))


def stage_lower_bound(case: PlanCase, stage: int) -> float:
    """The lower bound that follows from the busiest worker of one stage."""
    return _stage_lower_bound(case, _Paths.of_case(case), stage)


class _Paths(NamedTuple):
    """The paths of a micro-batch and the ends of a step, by stage."""

    start: list[float]
    """When the first forward can reach the stage."""
    back: list[float]
    """Time from the end of a backward in the stage to the end of the same micro-batch's backward in stage 0."""
    finish: list[float]
    """R and S."""
    last: list[float]
    """The last W, if it is separate."""

    @classmethod
    def of_case(cls, case: PlanCase) -> _Paths:
        price = case.action_costs
        return cls(
            _first_forward_times(case),
            _backward_return_times(case),
            [reduce + step for reduce, step in zip(price[Kind.R], price[Kind.S], strict=True)],
            list(price[Kind.W]) if case.split else [0.0] * case.stages,
        )


def _stage_lower_bound(case: PlanCase, paths: _Paths, stage: int) -> float:
    """The lower bound that follows from the busiest worker of one stage.

    Its first forward passes through the earlier stages, and its last backward passes back through them. Under the
    staggered optimizer the step is as long as the longest window of a stage, from its first F to its last W, so the
    path of the forward counts only from the stage whose window is considered.
    """
    start, back, finish, last = paths
    until, whole = _busiest_worker_time(case, stage)
    begin = [start[stage] - (start[s] if case.stagger else 0.0) for s in range(stage + 1)]
    above = [begin[s] + until + back[stage] - back[s] + last[s] + finish[s] for s in range(stage)]
    return max([begin[stage] + whole + finish[stage], *above])


def _first_forward_times(case: PlanCase) -> list[float]:
    """When the first forward can reach each stage."""
    forward = case.action_costs[Kind.F]
    return list(accumulate((forward[s] + case.send_costs[s] for s in range(case.stages - 1)), initial=0.0))


def _backward_return_times(case: PlanCase) -> list[float]:
    """Time from the end of a backward in each stage to the end of the same micro-batch's backward in stage 0."""
    backward = case.action_costs[case.backward_kind]
    return list(accumulate((case.send_costs[s] + backward[s] for s in range(case.stages - 1)), initial=0.0))


def _busiest_worker_time(case: PlanCase, stage: int) -> tuple[float, float]:
    """Least time of the busiest worker, from its first F to the end of its last I (or B), and to the end of its last W.

    Until a micro-batch has returned from the last stage there is only F to run, as many as fit into memory.
    With at most c activations, all W but c come before the last F, hence before the last I. And as at most c
    activations are alive at a time, n of them need ceil(n / c) lifetimes one after the other.
    """
    forward, backward = case.action_costs[Kind.F], case.action_costs[case.backward_kind]
    weight = case.action_costs[Kind.W][stage] if case.split else 0.0
    n = case.max_micros_per_worker(stage)
    c = min(n, case.max_activations(stage))
    trip = sum(forward[stage:]) + sum(backward[stage + 1 :]) + 2 * sum(case.send_costs[stage:])
    life = trip + backward[stage] + weight
    until = max(c * forward[stage], trip) + (n - c) * (forward[stage] + weight) + n * backward[stage]
    lives = -(-n // c) * life
    return max(until, lives - weight), max(until + c * weight, lives)
