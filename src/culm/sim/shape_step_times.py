"""Step times of other shapes than the planned one: what a leader predicts for them, and what they really take.

Small steps with a given schedule are cut, planned and re-planned around empty slots by the functions of a real run;
others use the formulas of `culm.sim.step_times`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from culm.errors import PlanError
from culm.plan import Slot
from culm.plan.model.layer_partition import segment_layer_ranges
from culm.plan.model.model_profile import LayerCost
from culm.plan.model.shape_search import DEFAULT_BANDWIDTH
from culm.plan.recover.role_assignment import (
    RecoveryPolicy,
    SurvivingCluster,
    assign_roles,
    stages_without_holder,
)
from culm.plan.replan.planned_schedule import PLANNED
from culm.plan.replan.staggered_period import staggered_period
from culm.plan.reshape.pipeline_shape import (
    Depths,
    PipelineShape,
    ShapeInputs,
    best_depths,
    build_shape,
    predict_shape_step_s,
    slots_to_fill,
)
from culm.plan.reshape.reconfigure_policy import PipelineLayout
from culm.plan.reshape.segment_costs import plan_costs
from culm.schedule import Costs, Kind, Plan, time_plan
from culm.schedule.plan_timing import action_costs, send_costs

if TYPE_CHECKING:
    from culm.sim.step_times import StepTimes

MAX_PLANNED_FORWARDS = 600
"""Steps with more forwards are not planned in other shapes."""

EmptySlots: TypeAlias = frozenset[Slot]

_NO_LOSS = RecoveryPolicy()
"""The policy while no slot is empty: it decides nothing."""


class ShapeStepTimes:
    """Seconds per step of one workload in any pipelines; each situation is computed once."""

    def __init__(self, step_times: StepTimes) -> None:
        self.step_times, self.workload = step_times, step_times.workload
        self._shape_cached = cache(lambda depths: build_shape(self.planning_model, depths))
        self._plan_cached = cache(self._plan_around_holes)
        self._template_cached = cache(self._template)
        self._planned_step_s_cached = cache(self._planned_step_s)
        self._predicted_cached = cache(
            lambda depths: predict_shape_step_s(self.planning_model, self._shape_cached(depths))
        )

    @property
    def plans_shapes(self) -> bool:
        """Whether other shapes are planned, instead of estimated by formulas."""
        w = self.workload
        return bool(w.schedule != PLANNED and w.layers) and w.stages * w.micro_batches <= MAX_PLANNED_FORWARDS

    @property
    def _knows_links(self) -> bool:
        """Whether the layers and the links are known: then the leader is assumed to predict what steps really take."""
        return self.workload.model is not None

    def predicted_step_s(self, depths: Depths) -> float:
        """Seconds that a leader predicts for pipelines of these depths; infinite if they are not possible."""
        if not self.plans_shapes:
            return self.step_times.layout_step_s(PipelineLayout(depths))
        if self._knows_links:
            return self._planned_step_s_cached(depths, frozenset(), _NO_LOSS)
        return self._predicted_cached(depths)

    def predicted_running_step_s(self, depths: Depths, holes: EmptySlots, policy: RecoveryPolicy) -> float:
        """Seconds that a leader would predict for the current shape with its empty slots."""
        predicts = self.plans_shapes and not self._knows_links
        plan = self._plan_cached(depths, holes, policy) if predicts else None
        if plan is not None:
            return predict_shape_step_s(self.planning_model, self._shape_cached(depths), plan)
        share = self.step_times.cluster_costs.shadow if policy.shadows_every_stage else 0.0
        return self.actual_step_s(depths, holes, policy) / (1 + share)

    def template(self, nodes: int) -> Depths:
        """The depths in which a leader puts so many nodes into pipelines anew; none if they cannot hold the model."""
        if self.plans_shapes and not self._knows_links:
            return self._template_cached(nodes)
        return self.step_times.unequal_depths(nodes)[1]

    def _template(self, nodes: int) -> Depths:
        try:
            return best_depths(self.planning_model, nodes)
        except PlanError:
            return ()

    def actual_step_s(self, depths: Depths, holes: EmptySlots, policy: RecoveryPolicy) -> float:
        """Seconds of a step. A part of the model without a worker in any pipeline is run by a worker that received a
        copy of it, beside its own part and for all pipelines."""
        shadows = policy.shadows_every_stage
        missing = max_uncovered_pipelines(depths, holes, shadows=shadows)
        if missing >= len(depths):
            alone = self.step_times.layout_step_s(PipelineLayout(depths[-1:])) * self.step_times.doubled_stage_slowdown(
                1, depths[-1]
            )
            return max(alone, self._evenly_shared_s(depths, holes)) * self._shadow_factor(shadows)
        if set(depths) == {self.workload.stages}:
            found = self._shadowed_step_s(depths, holes) if shadows else math.inf
            return found if found < math.inf else self._rerouted_step_s(depths, holes) * self._shadow_factor(shadows)
        if self.plans_shapes:
            return self._planned_step_s_cached(depths, holes, policy)
        twice = (
            self.step_times.doubled_stage_slowdown(len(depths), max(depths))
            if shadows and holes and not missing
            else 1.0
        )
        found = self.step_times.layout_step_s(PipelineLayout(depths[missing:])) * twice
        return max(found, self._evenly_shared_s(depths, holes)) * self._shadow_factor(shadows)

    def _evenly_shared_s(self, depths: Depths, holes: EmptySlots) -> float:
        """All work of a step, shared evenly by the present workers: a lower bound. The formulas count only one stage
        that is run beside another, however many there are."""
        present = sum(depths) - len(holes)
        return self.workload.micro_batches * self.workload.micro_batch_s / present if present else math.inf

    def _shadow_factor(self, shadows: bool) -> float:
        return 1 + self.step_times.cluster_costs.shadow if shadows else 1.0

    def _shadowed_step_s(self, depths: Depths, holes: EmptySlots) -> float:
        """Seconds if predecessors run both stages; infinite where a predecessor is missing, too."""
        if has_adjacent_holes(holes, self.workload.stages):
            return math.inf
        return self.step_times.shadowed(len(depths)) * self.step_times.takeover_slowdown(len(depths), holes)

    def _rerouted_step_s(self, depths: Depths, holes: EmptySlots) -> float:
        """Seconds if peers share the work. Several empty slots are assumed to be where they cost least, because nodes
        move there."""
        if len(holes) != 1 or len(depths) == 1:
            return self.step_times.layout_step_s(PipelineLayout(depths, len(holes)))
        (hole,) = holes
        spread = tuple(int(stage == hole.stage) for stage in range(self.workload.stages))
        return self.step_times.rerouted(len(depths), spread)

    # Planned as in a real run.

    @cached_property
    def planning_model(self) -> ShapeInputs:
        """The model as a leader sees it: its layers, or equal ones with the costs that plans are made with."""
        w = self.workload
        if w.model is not None:
            return ShapeInputs(layers=w.model.layers, micro_batches=w.micro_batches, schedule=w.schedule)
        costs = w.planning_costs or w.costs
        price = action_costs(replace(costs, split=0.0), w.stages)
        each = [sum(price[kind]) / w.layers for kind in (Kind.F, Kind.I, Kind.W)]
        return self._build_model(costs, [each] * w.layers)

    @cached_property
    def measured_model(self) -> ShapeInputs:
        """The same with the real costs of actions: the layers of a stage share its time evenly."""
        w = self.workload
        price = action_costs(replace(w.costs, split=0.0), w.stages)
        stages = segment_layer_ranges(self.planning_model.cut_layers(w.stages), w.layers)
        works = [[price[kind][s] / len(span) for kind in (Kind.F, Kind.I, Kind.W)] for s, span in enumerate(stages)]
        return self._build_model(w.costs, [works[s] for s, span in enumerate(stages) for _ in span])

    def _build_model(self, costs: Costs, works: Sequence[Sequence[float]]) -> ShapeInputs:
        """Layers with these times of F, I and W. Their bytes follow from the times of reduce and send."""
        w, price, crossing = (
            self.workload,
            action_costs(costs, self.workload.stages),
            send_costs(costs, self.workload.stages),
        )
        split_s = sum(price[Kind.I]) + sum(price[Kind.W]) - sum(price[Kind.B])
        rings = 2 * (w.pipelines - 1) / w.pipelines
        sizes = {
            "parameter_bytes": round(sum(price[Kind.R]) / rings * DEFAULT_BANDWIDTH / len(works)) if rings else 0,
            "state_bytes": round(w.state_bytes / len(works)),
            "output_bytes": round(sum(crossing) / len(crossing) * DEFAULT_BANDWIDTH) if crossing else 0,
            "activation_bytes": 0,
        }
        layers = [
            LayerCost(
                name=str(number),
                forward_s=forward,
                input_s=inputs,
                weight_s=weight,
                step_s=sum(price[Kind.S]) / len(works),
                halving_s=split_s / len(works) if w.early_sends else None,
                **sizes,
            )
            for number, (forward, inputs, weight) in enumerate(works)
        ]
        return ShapeInputs(layers=tuple(layers), micro_batches=w.micro_batches, schedule=w.schedule)

    def _plan_around_holes(self, depths: Depths, holes: EmptySlots, policy: RecoveryPolicy) -> Plan | None:
        """The plan with every slot filled, or around empty slots; None where a stage has no holder."""
        shape: PipelineShape = self._shape_cached(depths)
        plan = Plan.from_text(shape.plan_text)
        if not holes:
            return plan
        lost = {_plan_slot(plan, hole) for hole in holes}
        held = {slot: set(plan.stages_of(slot)) for slot in slots_to_fill(plan)}
        for replica in policy.initial_shadows(plan):
            held[replica.slot].add(replica.stage)
        left = {slot: frozenset(stages) for slot, stages in held.items() if slot not in lost}
        forward, inputs, weight = zip(*shape.segment_costs, strict=True)
        costs = Costs(forward=forward, input=inputs, weight=weight)
        cluster = SurvivingCluster(
            full_plan=plan, policy=policy, held_stages=left, costs=costs, synchronous_step=not self.workload.stagger
        )
        return None if stages_without_holder(cluster) else assign_roles(cluster).plan

    def _planned_step_s(self, depths: Depths, holes: EmptySlots, policy: RecoveryPolicy) -> float:
        plan = self._plan_cached(depths, holes, policy)
        if plan is None:
            return math.inf
        cuts = tuple(first for first, _ in self._shape_cached(depths).segments[1:])
        if self.workload.model is not None:
            costs = self.workload.model.costs_of_cuts(cuts, len(depths))
        else:
            costs = plan_costs(self.measured_model.layers, cuts, len(depths))
        return staggered_period(plan, costs) if self.workload.stagger else time_plan(plan, costs).makespan


def _plan_slot(plan: Plan, hole: Slot) -> int:
    """The plan's slot of a position in a pipeline."""
    return [slot for slot in slots_to_fill(plan) if slot // plan.stages == hole.pipeline][hole.stage]


def has_adjacent_holes(holes: Iterable[Slot], stages: int) -> bool:
    """Whether two adjacent slots of a pipeline are empty: then the shadow replica of one is lost, too."""
    gone = {(slot.pipeline, slot.stage) for slot in holes}
    return any((d, (s + 1) % stages) in gone for d, s in gone)


def max_uncovered_pipelines(depths: Sequence[int], holes: Iterable[Slot], *, shadows: bool) -> int:
    """The largest number of pipelines in which the same part of the model has no holder. With shadows a part of a
    pipeline has a holder while its own worker or the one before it is present."""
    gone = set(holes)
    bare = [(d, s) for d, s in gone if not shadows or (d, (s - 1) % depths[d]) in gone]
    edges = [(s / depths[d], 1) for d, s in bare] + [((s + 1) / depths[d], -1) for d, s in bare]
    most = now = 0
    for _, change in sorted(edges):  # parts that end at a position come before those that begin there
        now += change
        most = max(most, now)
    return most


def unheld_parts(depths: Sequence[int], holes: Iterable[Slot], *, shadows: bool) -> list[set[Slot]]:
    """For each part of the model without a holder in any pipeline: the slots that held it."""
    gone = set(holes)
    edges = sorted({edge for d, s in gone for edge in (s / depths[d], (s + 1) / depths[d])})
    found = []
    for begin, end in pairwise(edges):
        own = [Slot(d, int((begin + end) / 2 * depth)) for d, depth in enumerate(depths)]
        before = [Slot(d, (s - 1) % depths[d]) for d, s in own] if shadows else []
        if gone.issuperset(part := {*own, *before}):
            found.append(part)
    return found
