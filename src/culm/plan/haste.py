"""Gradients that somebody waits for go on sooner: some backwards of a schedule in halves, I before W. Pure.

A worker that ends a backward whole sends the gradient of its input last, though the stage before needs nothing else.
At the end of a 1F1B step all stages wait for each other so, and in GPipe they do from the first backward on. In halves
the gradient goes on before the weights are looked at, at a price: autograd is started more often. The order of the
schedule, what it keeps alive and what is learned stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from culm.plan.partition import Cuts, spans
from culm.plan.profile import LayerCost
from culm.schedule import Action, Costs, Kind, Plan, timing


def hastened(plan: Plan, layers: Sequence[LayerCost], cuts: Cuts) -> Plan:
    """The plan with as many of each worker's last backwards in halves as make its step the shortest; none, where what
    halves cost is not known."""
    segments = [layers[span.start : span.stop] for span in spans(cuts, len(layers))]
    price = max((_halving(segment) for segment in segments[1:]), default=math.inf)
    sooner = tuple(sum(layer.weight_s for layer in segment) for segment in segments)
    if price >= max(sooner):  # so that small layers are not looked at any further
        return plan
    costs = Costs(
        forward=tuple(sum(layer.forward_s for layer in segment) for segment in segments),
        input=tuple(sum(layer.input_s for layer in segment) for segment in segments),
        weight=sooner,
    )
    one = _first_pipeline(plan)
    each = plan.segments // plan.stages * len(one.micros_of(0))
    counts = sorted({0, plan.stages - 1, plan.segments - 1, each} & set(range(each + 1)))
    best = min(counts, key=lambda count: timing(_halved(one, count), costs).makespan + count * price)
    return _halved(plan, best)


def _halving(layers: Sequence[LayerCost]) -> float:
    return sum(math.inf if layer.halving_s is None else layer.halving_s for layer in layers)


def _first_pipeline(plan: Plan) -> Plan:
    """Pipelines of a schedule are alike: what is good for the first, which has the most to do, is good for all."""
    micros = len(plan.micros_of(0))
    return replace(plan, pipelines=1, micro_batches=micros, workers=plan.workers[: plan.stages])


def _halved(plan: Plan, count: int) -> Plan:
    """The last backwards of each worker in halves, so many of them; those of the first segment give no gradient."""
    return replace(plan, workers=tuple(_halved_last(row, count) for row in plan.workers)) if count else plan


def _halved_last(row: Sequence[Action], count: int) -> tuple[Action, ...]:
    backwards = [action for action in row if action.kind is Kind.B]
    chosen = {action for action in backwards[-count:] if action.segment > 0}
    return tuple(part for action in row for part in (_halves(action) if action in chosen else (action,)))


def _halves(action: Action) -> tuple[Action, Action]:
    return action._replace(kind=Kind.I), action._replace(kind=Kind.W)
