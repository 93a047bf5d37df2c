"""Split some backwards of a schedule into I and W, so that gradients other stages wait for are sent sooner. Pure.

A whole backward sends the gradient of its input last, although the previous stage needs nothing else. At the end of a
1F1B step all stages wait for each other this way, and in GPipe from the first backward on. A split backward sends that
gradient before it computes the gradients of the weights, at a cost: autograd runs more often. The order of the
schedule, the live activations and the trained result do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from culm.plan.model.layer_partition import Cuts, segment_layer_ranges
from culm.plan.model.model_profile import LayerCost
from culm.schedule import Action, Costs, Kind, Plan, time_plan
from culm.schedule.plan_timing import action_costs


def send_gradients_early(plan: Plan, layers: Sequence[LayerCost], cuts: Cuts) -> Plan:
    """Split as many of each worker's last backwards as make the step shortest; none if the overhead of splitting is
    not known."""
    segments = [layers[span.start : span.stop] for span in segment_layer_ranges(cuts, len(layers))]
    if not all(map(knows_split_overhead, segments[1:])):
        return plan
    costs = Costs(
        forward=tuple(sum(layer.forward_s for layer in segment) for segment in segments),
        input=tuple(sum(layer.input_s for layer in segment) for segment in segments),
        weight=tuple(sum(layer.weight_s for layer in segment) for segment in segments),
        split=tuple(sum(layer.halving_s or 0.0 for layer in segment) for segment in segments),
    )
    return split_awaited_backwards(plan, costs)


def knows_split_overhead(layers: Sequence[LayerCost]) -> bool:
    """Whether it was measured how much longer I and W of these layers take than B."""
    return all(layer.halving_s is not None for layer in layers)


def split_awaited_backwards(plan: Plan, costs: Costs) -> Plan:
    """The same by the costs of segments, with their overhead of splitting."""
    overheads = costs.split if isinstance(costs.split, tuple) else (costs.split,) * plan.segments
    overhead_s = max(overheads[1:], default=math.inf)
    if overhead_s >= max(action_costs(costs, plan.segments)[Kind.W]):  # cannot pay, so no plan has to be timed
        return plan
    whole = replace(costs, reduce=0.0, step=0.0, send=0.0, split=0.0)
    first_pipeline = _first_pipeline(plan)
    backwards = plan.segments // plan.stages * len(first_pipeline.micros_of(0))
    counts = sorted({0, plan.stages - 1, plan.segments - 1, backwards} & set(range(backwards + 1)))
    best = min(
        counts,
        key=lambda count: time_plan(_split_last_backwards(first_pipeline, count), whole).makespan + count * overhead_s,
    )
    return _split_last_backwards(plan, best)


def _first_pipeline(plan: Plan) -> Plan:
    """The pipelines of a schedule are alike: the best choice for the first, which has the most work, fits all."""
    micros = len(plan.micros_of(0))
    return replace(plan, pipelines=1, micro_batches=micros, workers=plan.workers[: plan.stages])


def _split_last_backwards(plan: Plan, count: int) -> Plan:
    """Split the last `count` backwards of each worker. Those of the first segment stay whole: they send nothing."""
    return replace(plan, workers=tuple(_split_last_in_row(row, count) for row in plan.workers)) if count else plan


def _split_last_in_row(row: Sequence[Action], count: int) -> tuple[Action, ...]:
    backwards = [action for action in row if action.kind is Kind.B]
    chosen = {action for action in backwards[-count:] if action.segment > 0}
    return tuple(part for action in row for part in (_split_backward(action) if action in chosen else (action,)))


def _split_backward(action: Action) -> tuple[Action, Action]:
    return action._replace(kind=Kind.I), action._replace(kind=Kind.W)
