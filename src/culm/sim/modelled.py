"""Workloads of models that were never measured: from counted FLOP and bytes, on the figures of an accelerator."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from culm.errors import PlanError
from culm.market.catalogue import catalogue
from culm.plan.instances import USABLE, device, network
from culm.plan.models import model
from culm.plan.offers import costs_of
from culm.plan.partition import fit, one_f_one_b, spans
from culm.schedule import Costs
from culm.sim.workload import Workload

if TYPE_CHECKING:
    from culm.plan.profile import Profile


def modelled(
    name: str,
    instance: str,
    *,
    nodes: int,
    stages: int | None = None,
    micro_batch: int | None = None,
    precision: str = "bf16",
    recompute: bool = True,
) -> Workload:
    """A model on so many nodes of an instance, one worker a node; as deep as asked for, or as it must be to fit.

    All stages cost what the slowest does: the cut is that of the planner, which makes them nearly alike. Raises
    PlanError or UsageError for a name that is not known, and when not even one pipeline fits.
    """
    machine, about = catalogue().find(instance), model(name)
    micro = micro_batch or about.micro_batch
    profile = _profile(name, machine.gpu, micro, precision, recompute)
    memory = int(USABLE * device(machine.gpu).memory)
    least = least_stages(profile, memory)
    P = stages or least
    D = min(nodes // P, about.batch // micro)
    if D < 1 or least > P:
        raise PlanError(
            f"{name} on {instance} takes {least} stages at least: use as many nodes, of which there are {nodes}"
        )
    cuts = fit(profile.layers, P, memory=memory, in_flight=one_f_one_b())
    if cuts is None:
        raise PlanError(f"{name} can not be cut into {P} stages that fit on {instance}: use --stages {least}")
    segments = [profile.layers[span.start : span.stop] for span in spans(cuts, len(profile.layers))]
    return Workload(
        name=name,
        pipelines=D,
        stages=P,
        micro_batches=about.batch // micro,
        micro_batch=micro,
        costs=_alike(costs_of(segments, D, network(instance, machine.gpu_count))),
        state_bytes=0.75 * sum(layer.resident_bytes for layer in profile.layers),
        least_stages=least,
        layers=len(profile.layers),
        memory="1f1b",
        instance=instance,
    )


@cache
def _profile(name: str, gpu: str, micro_batch: int, precision: str, recompute: bool) -> Profile:
    return model(name).profile(device(gpu), micro_batch, precision=precision, recompute=recompute)


def least_stages(profile: Profile, memory: int) -> int:
    """The fewest stages that fit. Raises PlanError if none do."""
    for stages in range(1, len(profile.layers) + 1):
        if fit(profile.layers, stages, memory=memory, in_flight=one_f_one_b()) is not None:
            return stages
    raise PlanError(f"the model does not fit on {profile.device} at any depth: use a larger one")


def _alike(costs: Costs) -> Costs:
    """Every stage as slow as the slowest."""
    assert isinstance(costs.forward, tuple)
    assert isinstance(costs.input, tuple)
    assert isinstance(costs.weight, tuple)
    works = list(zip(costs.forward, costs.input, costs.weight, strict=True))
    forward, inward, weight = max(works, key=sum)
    return Costs(
        forward=forward,
        input=inward,
        weight=weight,
        reduce=_most(costs.reduce),
        step=_most(costs.step),
        send=_most(costs.send),
    )


def _most(cost: float | tuple[float, ...]) -> float:
    return max(cost, default=0.0) if isinstance(cost, tuple) else cost
