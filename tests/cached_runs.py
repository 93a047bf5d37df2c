"""Cached facts about jobs: the reference result and the model check are computed once per test process and job."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import msgspec

from culm.cluster.prepare_run import inspect_layers, prepare_run
from culm.cluster.run_setup import RunSetup
from culm.config import RunConfig
from culm.job import Job
from culm.plan.model.early_grad_send import send_gradients_early
from culm.plan.model.layer_partition import partition_layers, segment_layer_ranges
from culm.plan.model.model_profile import LayerCost
from culm.plan.reshape.run_schedule import ScheduledStep, choose_schedule
from culm.plan.reshape.segment_costs import segment_costs
from culm.runtime.compute.model_check import ModelInfo
from culm.schedule import Kind, Plan
from culm.testing import Faults, ReferenceResult, SimulatedRun, reference
from culm.testing.survival_check import LATENCY_S, ActionCost, run_and_compare


@dataclass(frozen=True)
class _CachedJob:
    job: Job

    @functools.cached_property
    def reference_result(self) -> ReferenceResult:
        return reference(self.job)

    @functools.cached_property
    def model_info(self) -> ModelInfo:
        return inspect_layers(self.job)


_CACHE: dict[int, _CachedJob] = {}
"""By id of the job, which the entry keeps alive: jobs are not hashable."""


def _cached(job: Job) -> _CachedJob:
    return _CACHE.setdefault(id(job), _CachedJob(job))


def reference_result(job: Job) -> ReferenceResult:
    """The result of training in one process."""
    return _cached(job).reference_result


def cached_setup(job: Job, *, same_layers_as: Job | None = None, **request: Any) -> RunSetup:
    """The setup of a run; `same_layers_as` is a job with the same layers, whose model check may be cached."""
    return prepare_run(job, RunConfig(**request), model_info=_cached(same_layers_as or job).model_info, measure=False)


def with_early_grad_send(setup: RunSetup) -> RunSetup:
    """The same run if split backwards cost nothing, as with layers larger than those of tests."""
    layers = tuple(msgspec.structs.replace(layer, weight_s=1.0, halving_s=0.0) for layer in setup.layers)
    cuts = tuple(first for first, _ in setup.segments[1:])
    plan = send_gradients_early(Plan.from_text(setup.plan), layers, cuts).to_text()
    assert plan != setup.plan
    return msgspec.structs.replace(setup, layers=layers, plan=plan)


def with_split_plan(setup: RunSetup) -> RunSetup:
    """A run with the schedule `planned` for layers of different costs in which split backwards cost nothing. Its plan
    has whole and split backwards."""
    layers = tuple(
        msgspec.structs.replace(
            layer, forward_s=1.0 + index % 2, input_s=1.5, weight_s=0.75 + index % 3, halving_s=0.0, step_s=0.25
        )
        for index, layer in enumerate(setup.layers)
    )
    setup = _with_plan(setup, layers, may_use_two_ranges=False)
    plan = Plan.from_text(setup.plan)
    assert not plan.all_backwards_split
    assert any(action.kind is Kind.I for row in plan.workers for action in row)
    return setup


def with_two_range_plan(setup: RunSetup) -> RunSetup:
    """A run with the schedule `planned` in which each worker has two segments and backwards are split."""
    layers = tuple(
        msgspec.structs.replace(
            layer, forward_s=1.0, input_s=1.0, weight_s=1.0, halving_s=0.0, activation_bytes=0, output_bytes=0
        )
        for layer in setup.layers
    )
    setup = _with_plan(setup, layers, may_use_two_ranges=True)
    assert len(setup.segments) == 2 * setup.stages
    assert any(action.kind is Kind.I for row in Plan.from_text(setup.plan).workers for action in row)
    return setup


def _with_plan(setup: RunSetup, layers: tuple[LayerCost, ...], *, may_use_two_ranges: bool) -> RunSetup:
    step = ScheduledStep(
        layers=layers,
        cuts=partition_layers(layers, setup.stages),
        pipelines=setup.pipelines,
        stages=setup.stages,
        micro_batches=Plan.from_text(setup.plan).micro_batches,
        synchronous=setup.synchronous_step,
        may_use_two_ranges=may_use_two_ranges,
    )
    choice = choose_schedule("planned", step)
    return msgspec.structs.replace(
        setup,
        layers=layers,
        segments=tuple((span.start, span.stop) for span in segment_layer_ranges(choice.cuts, len(layers))),
        costs=segment_costs(layers, choice.cuts),
        plan=choice.plan.to_text(),
        schedule=choice.name,
    )


def run_with_faults(
    job: Job, faults: Faults, *, cost: ActionCost | None = None, latency: float = LATENCY_S, **request: Any
) -> SimulatedRun:
    """Run with faults; checks that all were injected and that the result equals that of one process."""
    run = run_and_compare(
        job, cached_setup(job, **request), faults, 0, reference_result(job), cost=cost, latency=latency
    )
    assert not run.faults_not_reached(faults), run.history
    return run
