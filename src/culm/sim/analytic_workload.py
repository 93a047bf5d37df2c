"""Workloads of models that were not measured: from FLOP and byte counts and the figures of an accelerator."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from culm.errors import PlanError
from culm.market.catalogue import load_catalogue
from culm.plan.model.accelerators import USABLE_MEMORY_SHARE, find_accelerator
from culm.plan.model.layer_partition import find_cuts, in_flight_1f1b, segment_layer_ranges
from culm.plan.model.reference_models import find_model
from culm.plan.rent.link_costs import links_of_instance, stage_costs
from culm.plan.replan.planned_schedule import PLANNED
from culm.schedule import Costs
from culm.sim.model_layers import ModelLayers
from culm.sim.workload import Workload

if TYPE_CHECKING:
    from culm.plan.model.model_profile import Profile


def analytic_workload(
    name: str,
    instance: str,
    *,
    nodes: int,
    stages: int | None = None,
    micro_batch: int | None = None,
    precision: str = "bf16",
    recompute: bool = True,
    schedule: str = PLANNED,
) -> Workload:
    """A model on `nodes` nodes of an instance, one worker per accelerator, with `stages` or the fewest that fit.

    All stages cost as much as the slowest: the planner's partition makes them nearly equal. Raises PlanError or
    UsageError for an unknown name, and if not even one pipeline fits.
    """
    node, model = load_catalogue().find(instance), find_model(name)
    micro = micro_batch or model.micro_batch
    profile = _cached_profile(name, node.gpu, micro, precision, recompute)
    device, workers = find_accelerator(node.gpu), nodes * node.gpu_count
    memory = int(USABLE_MEMORY_SHARE * device.memory)
    min_stages = min_stages_that_fit(profile, memory)
    P = stages or min_stages
    D = min(workers // P, model.global_batch // micro)
    if D < 1 or min_stages > P:
        raise PlanError(
            f"{name} on {instance} needs at least {min_stages} stages: use --nodes {-(-min_stages // node.gpu_count)} "
            f"instead of {nodes}"
        )
    cuts = find_cuts(profile.layers, P, memory=memory, in_flight=in_flight_1f1b())
    if cuts is None:
        raise PlanError(f"{name} cannot be cut into {P} stages that fit on {instance}: use --stages {min_stages}")
    segments = [profile.layers[span.start : span.stop] for span in segment_layer_ranges(cuts, len(profile.layers))]
    links = links_of_instance(node.instance, node.gpu, node.gpu_count)
    return Workload(
        name=name,
        pipelines=D,
        stages=P,
        micro_batches=model.global_batch // micro,
        micro_batch=micro,
        costs=_slowest_stage_costs(stage_costs(segments, D, links)),
        workers_per_node=node.gpu_count,
        schedule=schedule,
        state_bytes=0.75 * sum(layer.parameter_bytes + layer.state_bytes for layer in profile.layers),
        least_stages=min_stages,
        layers=len(profile.layers),
        model=ModelLayers(profile.layers, links),
        memory="1f1b",
        instance=node.instance,
    )


@cache
def _cached_profile(name: str, gpu: str, micro_batch: int, precision: str, recompute: bool) -> Profile:
    return find_model(name).profile(find_accelerator(gpu), micro_batch, precision=precision, recompute=recompute)


def min_stages_that_fit(profile: Profile, memory: int) -> int:
    """The fewest stages that fit. Raises PlanError if none do."""
    for stages in range(1, len(profile.layers) + 1):
        if find_cuts(profile.layers, stages, memory=memory, in_flight=in_flight_1f1b()) is not None:
            return stages
    raise PlanError(f"the model does not fit on {profile.device} at any depth: use a larger device")


def _slowest_stage_costs(costs: Costs) -> Costs:
    """Costs with every stage as slow as the slowest."""
    assert isinstance(costs.forward, tuple)
    assert isinstance(costs.input, tuple)
    assert isinstance(costs.weight, tuple)
    stages = list(zip(costs.forward, costs.input, costs.weight, strict=True))
    forward_s, input_s, weight_s = max(stages, key=sum)
    return Costs(
        forward=forward_s,
        input=input_s,
        weight=weight_s,
        reduce=_max_cost(costs.reduce),
        step=_max_cost(costs.step),
        send=_max_cost(costs.send),
    )


def _max_cost(cost: float | tuple[float, ...]) -> float:
    return max(cost, default=0.0) if isinstance(cost, tuple) else cost
