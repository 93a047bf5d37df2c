"""Policy case: the inputs of a decision about the shape of the pipelines, and the decision. Pure.

A decision plans every possible layout, which takes minutes for a thousand nodes. The case contains values only, so that
a thread can decide while the leader handles further events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from culm.cluster.leader.events import ReshapeVerdict
from culm.plan.reshape.pipeline_shape import (
    Depths,
    PipelineShape,
    ShapeInputs,
    best_depths,
    build_shape,
    largest_memory_need,
    predict_shape_step_s,
)
from culm.plan.reshape.reconfigure_policy import PipelineLayout, ReconfigureKind, ReconfigureState
from culm.plan.reshape.reshape_decision import (
    RunSpeed,
    ShapeLimits,
    decide_reshape,
    estimate_reshape_costs,
    reshape_options,
)
from culm.schedule import Plan
from culm.strategies.strategy import Strategy


class LayoutStepTimes:
    """Predicted step times of layouts, each computed once."""

    def __init__(self, model: ShapeInputs) -> None:
        self.model = model
        self._by_depths: dict[Depths, float] = {}

    def predict(self, layout: PipelineLayout) -> float:
        depths = sorted_depths(layout)
        if depths not in self._by_depths:
            self._by_depths[depths] = predict_shape_step_s(self.model, build_shape(self.model, depths))
        return self._by_depths[depths]


@dataclass(frozen=True, kw_only=True)
class PolicyCase:
    """The run as it is now."""

    strategy: Strategy
    reconfigure: str
    """The policy: cost or bamboo."""
    step_times: LayoutStepTimes
    state: ReconfigureState
    shape: PipelineShape
    plan: str
    """The plan of the epoch, in which slots may be empty."""
    measured_step_s: float
    remaining_steps: int
    time_between_losses_s: float
    measured_reshape_s: float | None
    now: float
    model: ShapeInputs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.step_times.model)

    def decide(self) -> ReshapeVerdict | None:
        """What the policy decides; None: nothing."""
        layouts = self._possible_layouts()
        costs = estimate_reshape_costs(self.state, layouts, self._speed(), self.step_times.predict, self.now)
        decided = decide_reshape(self.strategy.reshape_policy(self.reconfigure), self.state, layouts, costs, self.now)
        if decided is None:
            return None
        decision, why = decided
        depths = sorted_depths(decision.layout) if decision.changes_shape else None
        return ReshapeVerdict(decision.kind, str(decision.layout), depths, why)

    def find_smaller_stages(self) -> ReshapeVerdict | None:
        """The fastest shape of the present nodes in which the stage that needs most memory needs less than now; None:
        there is none."""
        layers = self.model.layers
        limit = largest_memory_need(self.shape, layers)
        smaller = [
            layout
            for layout in reshape_options(self.state, replace(self._limits, allows_one_pipeline=True))
            if sum(layout.depths) <= len(self.state.zone_by_node)
            and largest_memory_need(build_shape(self.model, sorted_depths(layout)), layers) < limit
        ]
        if not smaller:
            return None
        chosen = min(smaller, key=self.step_times.predict)
        why = f"{chosen} has stages that need less memory"
        return ReshapeVerdict("shrink", str(chosen), sorted_depths(chosen), why)

    def _possible_layouts(self) -> Mapping[PipelineLayout, ReconfigureKind]:
        """The layouts that the nodes allow; under `templates` there is exactly one for each number of nodes."""
        if self.strategy.rebuilds_pipelines:
            kinds: dict[PipelineLayout, ReconfigureKind] = {self.state.layout: "stay"}
            kinds.setdefault(PipelineLayout(best_depths(self.model, len(self.state.zone_by_node))), "uneven")
            return kinds
        return reshape_options(self.state, self._limits)

    @property
    def _limits(self) -> ShapeLimits:
        model = self.model
        return ShapeLimits(
            min_depth=model.min_depth,
            max_depth=model.max_depth,
            equal_depths=model.ranges > 1,
            allows_one_pipeline=self.strategy.allows_one_pipeline,
        )

    def _speed(self) -> RunSpeed:
        return RunSpeed(
            measured_step_s=self.measured_step_s,
            predicted_step_s=predict_shape_step_s(self.model, self.shape, Plan.from_text(self.plan)),
            remaining_s=self.remaining_steps * self.measured_step_s,
            time_between_losses_s=self.time_between_losses_s,
            state_bytes=sum(layer.resident_bytes for layer in self.model.layers),
            measured_reshape_s=self.measured_reshape_s,
        )


def sorted_depths(layout: PipelineLayout) -> Depths:
    """The depths of a layout, the deepest first."""
    return tuple(sorted(layout.depths, reverse=True))
