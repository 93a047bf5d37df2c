"""Every run equals the reference bit for bit, however the model is partitioned: weights, optimizer state, buffers,
losses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from tests.cached_runs import cached_setup, reference_result, with_early_grad_send
from tests.runtime.sample_data import sgd
from tests.runtime.sample_jobs import JOBS, everything, forked, job_with, stack

from culm.job import Job
from culm.testing import ReferenceResult, SimulatedRun, reference
from culm.testing.simulated_cluster import run_prepared

Shape = tuple[str, int, int]
"""(schedule, pipelines, stages); 99 stages: one layer each."""


@functools.cache
def job_of(name: str, *, exact: bool = False) -> Job:
    """With three micro-batches instead of five: enough for different orders of summation, and not divisible by two
    pipelines or two stages."""
    job = JOBS[name]
    few = 3 if job.global_batch == 5 * job.micro_batch else job.global_batch // job.micro_batch
    return job_with(job, exact=exact, global_batch=few * job.micro_batch)


def run(job: Job, shape: Shape, *, like: Job | None = None, strategy: str = "none", **request: Any) -> SimulatedRun:
    schedule, pipelines, stages = shape
    most = len(job.layers) // (2 if schedule == "interleaved" else 1)
    shaped = {"schedule": schedule, "pipelines": pipelines, "stages": min(stages, most)}
    return run_prepared(job, cached_setup(job, same_layers_as=like, strategy=strategy, **shaped, **request))


def same(found: SimulatedRun, wanted: ReferenceResult) -> None:
    """Names the first tensor that differs, which a digest cannot."""
    assert found.losses == wanted.losses
    ours, theirs = found.snapshot.tensors, wanted.snapshot.tensors
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert found.snapshot.scalars == wanted.snapshot.scalars
    assert (found.weights_sha256, found.state_sha256) == (wanted.weights_sha256, wanted.state_sha256)


FUSED: dict[Shape, str] = {("1f1b", 1, 99): "shadow", ("gpipe", 1, 2): "none", ("interleaved", 1, 2): "none"}
"""Each layer alone, with shadow replicas that run forwards eagerly; and several together."""
SPLIT: tuple[Shape, ...] = ("zb", 1, 99), ("zb", 1, 1)
ONE = list(zip(JOBS, itertools.cycle(FUSED), itertools.cycle(SPLIT), strict=False))
"""Jobs that differ in one setting are adjacent, and run with different shapes in turn."""
SEVERAL: dict[Shape, str] = {("1f1b", 2, 2): "reroute", ("zb", 3, 2): "none"}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, *shapes in ONE for shape in shapes], ids=str)
def test_one_pipeline_equals_the_reference(name: str, shape: Shape) -> None:
    job = job_of(name)
    same(run(job, shape, strategy=FUSED.get(shape, "none")), reference_result(job))


@pytest.mark.parametrize(("name", "shape"), list(zip(JOBS, itertools.cycle(SEVERAL), strict=False)), ids=str)
def test_exact_runs_equal_the_reference_with_any_number_of_pipelines(name: str, shape: Shape) -> None:
    job = job_of(name, exact=True)
    same(run(job, shape, like=job_of(name), strategy=SEVERAL[shape]), reference_result(job))


@pytest.mark.parametrize("shape", [("gpipe", 1, 3), ("1f1b", 1, 99), ("interleaved", 1, 2), ("1f1b", 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["everything", "recompute", "batch norm"])
def test_sending_gradients_before_the_weight_gradients_changes_nothing(name: str, shape: Shape) -> None:
    schedule, pipelines, stages = shape
    job = job_of(name, exact=pipelines > 1)
    most = len(job.layers) // (2 if schedule == "interleaved" else 1)
    shaped = {"schedule": schedule, "pipelines": pipelines, "stages": min(stages, most), "strategy": "none"}
    same(
        run_prepared(job, with_early_grad_send(cached_setup(job, same_layers_as=job_of(name), **shaped))),
        reference_result(job),
    )


@functools.cache
def in_parts(micro_batches: int) -> Job:
    return job_with(everything, global_batch=2 * micro_batches, micro_batch=2)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
def test_any_number_of_micro_batches_works_even_fewer_than_stages(schedule: str, micro_batches: int) -> None:
    job = in_parts(micro_batches)
    for stages in (2, 99):
        same(run(job, (schedule, 1, stages), like=everything), reference_result(job))


@pytest.mark.parametrize("cuts", [(1, 2), (1, 5), (4, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_uneven_stages_work(schedule: str, cuts: tuple[int, int]) -> None:
    same(run(everything, (schedule, 1, 3), cuts=cuts), reference_result(everything))


@functools.cache
def seven() -> Job:
    return job_with(everything, exact=True, global_batch=14, micro_batch=2)


@pytest.mark.parametrize("pipelines", [1, 2, 3, 4])
def test_exact_with_micro_batches_that_the_pipelines_do_not_divide(pipelines: int) -> None:
    job = seven()
    for schedule, stages in (("gpipe", 1), ("interleaved", 2), ("zb", 3)):
        same(run(job, (schedule, pipelines, stages), like=everything), reference_result(job))


@pytest.mark.parametrize("seed", range(4))
def test_exact_holds_for_layers_that_branch_on_their_data(seed: int) -> None:
    job = job_with(forked, seed=seed)
    for shape in (("gpipe", 1, 1), ("zb", 1, 2), ("1f1b", 2, 3)):
        same(run(job, shape, like=forked), reference_result(job))


@pytest.mark.parametrize("seed", range(16))
def test_layers_in_any_order_equal_the_reference(seed: int) -> None:
    """Random stacks of layers that permute, expand, slice and transpose tensors."""
    job = stack(seed)
    for shape in [("gpipe", 1, 1), ("zb", 1, 2), ("zb", 1, 99)] + ([("1f1b", 2, 2)] if job.exact else []):
        same(run(job, shape), reference_result(job))


@pytest.mark.parametrize("pipelines", [2, 3, 5])
@pytest.mark.parametrize("name", ["plain", "weights as tensors", "everything", "random loss, quietly", "random layers"])
def test_fast_runs_equal_the_reference_up_to_the_order_of_sums(name: str, pipelines: int) -> None:
    """One step of SGD with a rate of one changes a weight by its gradient. Eight roundings of it are allowed."""
    job = job_with(JOBS[name], optimizer=partial(torch.optim.SGD, lr=1.0), steps=1, lr_schedule=None, clip_norm=None)
    found, wanted = run(job, ("1f1b", pipelines, 2), like=job_of(name)), reference(job)
    assert found.losses == wanted.losses
    for name, value in found.snapshot.tensors.items():
        torch.testing.assert_close(value, wanted.snapshot.tensors[name], rtol=8 * 2**-24, atol=8 * 2**-24)


def test_a_run_is_reproducible() -> None:
    assert run(everything, ("zb", 2, 3)).state_sha256 == run(everything, ("zb", 2, 3)).state_sha256


def test_every_sample_is_counted_once() -> None:
    summary = run(job_of("batch norm", exact=True), ("zb", 3, 2)).summary
    job = job_of("batch norm")
    assert summary["samples"] == summary["samples_expected"] == job.steps * job.global_batch
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)


def test_recomputing_changes_nothing() -> None:
    job = job_with(JOBS["recompute"], optimizer=sgd)
    assert reference(job).state_sha256 == reference(dataclasses.replace(job, recompute=False)).state_sha256
