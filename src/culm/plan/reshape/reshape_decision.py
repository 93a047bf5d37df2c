"""Decide when a run changes its shape and into which; used by the leader of a real run and by the simulator. Pure.

    SettleTimer               when to decide, after nodes have joined or been lost
    reshape_options           the shapes that the present nodes could form, within the limits of model and strategy
    estimate_reshape_costs    predicted step times of those shapes, from the measured speed of the run (`RunSpeed`)
    decide_reshape            the shape that the reconfigure policy chooses

Callers provide shapes and times: a leader measures them, a simulator computes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from culm.plan.model.shape_search import DEFAULT_BANDWIDTH, TIE_TOLERANCE
from culm.plan.reshape.reconfigure_policy import (
    PipelineLayout,
    ReconfigureCosts,
    ReconfigureDecision,
    ReconfigureKind,
    ReconfigureState,
    decide_by_bamboo_rule,
    decide_by_cost,
    possible_layouts,
)

SETTLE_STEPS = 5
"""The decision is made this many steps after the last node joined or was lost: changes tend to come in groups ..."""
SETTLE_S = 60.0
"""... or after this many seconds: where steps take minutes the next change would come before the fifth step."""
RESHAPE_DELAY_STEPS = 2
"""A decision made while a step commits takes effect this many steps later: the next step may have started already."""
_MAX_DEPTHS_TRIED = 6
"""About this many depths are tried, where a model can be cut into many."""


class SettleTimer:
    """The members seen last, since which step they are unchanged, and whether a decision was made for them."""

    def __init__(self) -> None:
        self.is_decided = False
        self._membership: Hashable = None
        self._since = (0, 0.0)

    def observe(self, membership: Hashable, step: int, now: float) -> None:
        """Record the members and the shape at the commit of a step. If they changed, the wait starts anew."""
        if membership != self._membership:
            self.is_decided, self._membership, self._since = False, membership, (step, now)

    def is_due(self, step: int, now: float) -> bool:
        """Whether the members have been unchanged for long enough and no decision was made for them yet."""
        since, then = self._since
        return not self.is_decided and (step >= since + SETTLE_STEPS or (step > since and now - then >= SETTLE_S))


def settle_steps(step_s: float) -> int:
    """The number of steps to wait where a step takes `step_s`."""
    return max(1, min(SETTLE_STEPS, math.ceil(SETTLE_S / step_s))) if step_s > 0 else SETTLE_STEPS


@dataclass(frozen=True, kw_only=True)
class ShapeLimits:
    """The shapes that a model and a strategy allow."""

    min_depth: int
    max_depth: int
    equal_depths: bool = False
    """Whether all pipelines must have the same depth."""
    allows_one_pipeline: bool = False
    """Whether several pipelines may become one: its stages need replicas that are not peers."""

    def allows(self, layout: PipelineLayout, state: ReconfigureState) -> bool:
        """Whether the depths are possible and, where only peers hold replicas, there is more than one pipeline."""
        alone = len(layout.depths) == 1 < len(state.depths) and not self.allows_one_pipeline
        fits = self.min_depth <= min(layout.depths) and max(layout.depths) <= self.max_depth
        return fits and not alone and (not self.equal_depths or len(set(layout.depths)) == 1)


def reshape_options(state: ReconfigureState, limits: ShapeLimits) -> dict[PipelineLayout, ReconfigureKind]:
    """The layouts that the present nodes could form, each with the kind of change it is."""
    least, most = limits.min_depth, min(limits.max_depth, len(state.zone_by_node))
    depths = {*range(least, most + 1, max(1, (most - least) // _MAX_DEPTHS_TRIED)), *state.depths}
    return {
        layout: kind for layout, kind in possible_layouts(state, sorted(depths)).items() if limits.allows(layout, state)
    }


@dataclass(frozen=True, kw_only=True)
class RunSpeed:
    """Measured and expected times of a run, in seconds."""

    measured_step_s: float
    """A step in the current shape, measured ..."""
    predicted_step_s: float
    """... and predicted. Predictions for other shapes are assumed to be off by the same factor."""
    remaining_s: float
    """Seconds until the last step, at the current speed."""
    time_between_losses_s: float
    """Mean time between two losses so far; infinite before the first."""
    state_bytes: float
    measured_reshape_s: float | None = None
    """Duration of recent changes of shape; None: there was none yet."""

    @property
    def expected_reshape_s(self) -> float:
        """Expected duration of a change of shape: that of the last ones, or the time to move the whole state; plus
        about half a step in which the open step drains."""
        moving = self.state_bytes / DEFAULT_BANDWIDTH if self.measured_reshape_s is None else self.measured_reshape_s
        return moving + self.measured_step_s / 2


def estimate_reshape_costs(
    state: ReconfigureState,
    candidates: Mapping[PipelineLayout, ReconfigureKind],
    speed: RunSpeed,
    predict_step_s: Callable[[PipelineLayout], float],
    now: float,
) -> ReconfigureCosts:
    """Step times of the candidate layouts, predicted and scaled by the measured step. Layouts with empty slots are left
    out, except the current one: its cost is measured."""
    scale = speed.measured_step_s / speed.predicted_step_s if speed.predicted_step_s else 1.0
    steps = {layout: scale * predict_step_s(layout) for layout in candidates if not layout.empty_slot_count}
    steps[state.layout] = speed.measured_step_s
    return ReconfigureCosts(
        step_s_by_layout=steps,
        next_loss_at=now + min(speed.remaining_s, speed.time_between_losses_s),
        move_s=speed.expected_reshape_s,
    )


def decide_reshape(
    policy: str,
    state: ReconfigureState,
    candidates: Mapping[PipelineLayout, ReconfigureKind],
    costs: ReconfigureCosts,
    now: float,
) -> tuple[ReconfigureDecision, str]:
    """The decision of the reconfigure policy (`cost` or `bamboo`) and its reason."""
    if policy == "bamboo":
        return decide_by_bamboo_rule(state, costs, now)
    return decide_by_cost(state, costs, now, candidates=candidates, tolerance=TIE_TOLERANCE)
