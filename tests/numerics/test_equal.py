"""Every run equals the reference bit for bit, wherever the model is cut: weights, optimizer state, buffers, losses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from tests.known import hasty, ready, truth

from culm.job import Job
from culm.testing import Simulated, Trained, reference
from culm.testing.cluster import enact

from .jobs import JOBS, but, everything, forked, stack
from .samples import sgd

Shape = tuple[str, int, int]
"""(schedule, pipelines, stages); 99 stages: one layer each."""


@functools.cache
def job_of(name: str, *, exact: bool = False) -> Job:
    """With three micro-batches for five: there are orders enough to sum in, and neither two pipelines nor two stages
    divide them."""
    job = JOBS[name]
    few = 3 if job.global_batch == 5 * job.micro_batch else job.global_batch // job.micro_batch
    return but(job, exact=exact, global_batch=few * job.micro_batch)


def run(job: Job, shape: Shape, *, like: Job | None = None, strategy: str = "none", **request: Any) -> Simulated:
    schedule, pipelines, stages = shape
    most = len(job.layers) // (2 if schedule == "interleaved" else 1)
    shaped = {"schedule": schedule, "pipelines": pipelines, "stages": min(stages, most)}
    return enact(job, ready(job, like=like, strategy=strategy, **shaped, **request))


def same(found: Simulated, wanted: Trained) -> None:
    """Names the first tensor that differs, which a digest could not."""
    assert found.losses == wanted.losses
    ours, theirs = found.snapshot.tensors, wanted.snapshot.tensors
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert found.snapshot.scalars == wanted.snapshot.scalars
    assert (found.weights_sha256, found.state_sha256) == (wanted.weights_sha256, wanted.state_sha256)


FUSED: dict[Shape, str] = {("1f1b", 1, 99): "shadow", ("gpipe", 1, 2): "none", ("interleaved", 1, 2): "none"}
"""Each layer by itself, with others beside it that keep copies, and run ahead; and several together."""
SPLIT: tuple[Shape, ...] = ("zb", 1, 99), ("zb", 1, 1)
ONE = list(zip(JOBS, itertools.cycle(FUSED), itertools.cycle(SPLIT), strict=False))
"""Jobs that differ in one thing follow each other, and meet the shapes in turn."""
SEVERAL: dict[Shape, str] = {("1f1b", 2, 2): "reroute", ("zb", 3, 2): "none"}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, *shapes in ONE for shape in shapes], ids=str)
def test_one_pipeline_equals_the_reference(name: str, shape: Shape) -> None:
    job = job_of(name)
    same(run(job, shape, strategy=FUSED.get(shape, "none")), truth(job))


@pytest.mark.parametrize(("name", "shape"), list(zip(JOBS, itertools.cycle(SEVERAL), strict=False)), ids=str)
def test_exact_runs_equal_the_reference_with_any_number_of_pipelines(name: str, shape: Shape) -> None:
    job = job_of(name, exact=True)
    same(run(job, shape, like=job_of(name), strategy=SEVERAL[shape]), truth(job))


@pytest.mark.parametrize("shape", [("gpipe", 1, 3), ("1f1b", 1, 99), ("interleaved", 1, 2), ("1f1b", 2, 2)], ids=str)
@pytest.mark.parametrize("name", ["everything", "recompute", "batch norm"])
def test_gradients_that_go_on_before_the_weights_are_done_change_nothing(name: str, shape: Shape) -> None:
    schedule, pipelines, stages = shape
    job = job_of(name, exact=pipelines > 1)
    most = len(job.layers) // (2 if schedule == "interleaved" else 1)
    shaped = {"schedule": schedule, "pipelines": pipelines, "stages": min(stages, most), "strategy": "none"}
    same(enact(job, hasty(ready(job, like=job_of(name), **shaped))), truth(job))


@functools.cache
def in_parts(micro_batches: int) -> Job:
    return but(everything, global_batch=2 * micro_batches, micro_batch=2)


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb", "interleaved"])
def test_any_number_of_micro_batches_will_do_also_fewer_than_stages(schedule: str, micro_batches: int) -> None:
    job = in_parts(micro_batches)
    for stages in (2, 99):
        same(run(job, (schedule, 1, stages), like=everything), truth(job))


@pytest.mark.parametrize("cuts", [(1, 2), (1, 5), (4, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_uneven_stages_will_do(schedule: str, cuts: tuple[int, int]) -> None:
    same(run(everything, (schedule, 1, 3), cuts=cuts), truth(everything))


@functools.cache
def seven() -> Job:
    return but(everything, exact=True, global_batch=14, micro_batch=2)


@pytest.mark.parametrize("pipelines", [1, 2, 3, 4])
def test_exact_with_micro_batches_that_the_pipelines_do_not_divide(pipelines: int) -> None:
    job = seven()
    for schedule, stages in (("gpipe", 1), ("interleaved", 2), ("zb", 3)):
        same(run(job, (schedule, pipelines, stages), like=everything), truth(job))


@pytest.mark.parametrize("seed", range(4))
def test_exact_holds_for_layers_that_go_one_way_or_another_by_their_data(seed: int) -> None:
    job = but(forked, seed=seed)
    for shape in (("gpipe", 1, 1), ("zb", 1, 2), ("1f1b", 2, 3)):
        same(run(job, shape, like=forked), truth(job))


@pytest.mark.parametrize("seed", range(16))
def test_layers_in_any_order_equal_the_reference(seed: int) -> None:
    """Random stacks of layers that lay out, repeat, slice and turn tensors in every way that came to mind."""
    job = stack(seed)
    for shape in [("gpipe", 1, 1), ("zb", 1, 2), ("zb", 1, 99)] + ([("1f1b", 2, 2)] if job.exact else []):
        same(run(job, shape), truth(job))


@pytest.mark.parametrize("pipelines", [2, 3, 5])
@pytest.mark.parametrize("name", ["plain", "weights as tensors", "everything", "random loss, quietly", "random layers"])
def test_fast_runs_equal_the_reference_up_to_the_order_of_sums(name: str, pipelines: int) -> None:
    """One step of SGD with a rate of one moves a weight by its gradient: eight roundings of it are allowed."""
    job = but(JOBS[name], optimizer=partial(torch.optim.SGD, lr=1.0), steps=1, lr_schedule=None, clip_norm=None)
    found, wanted = run(job, ("1f1b", pipelines, 2), like=job_of(name)), reference(job)
    assert found.losses == wanted.losses
    for name, value in found.snapshot.tensors.items():
        torch.testing.assert_close(value, wanted.snapshot.tensors[name], rtol=8 * 2**-24, atol=8 * 2**-24)


def test_a_run_repeats_itself() -> None:
    assert run(everything, ("zb", 2, 3)).state_sha256 == run(everything, ("zb", 2, 3)).state_sha256


def test_every_sample_is_counted_once() -> None:
    summary = run(job_of("batch norm", exact=True), ("zb", 3, 2)).summary
    job = job_of("batch norm")
    assert summary["samples"] == summary["samples_expected"] == job.steps * job.global_batch
    assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)


def test_recomputing_changes_nothing() -> None:
    job = but(JOBS["recompute"], optimizer=sgd)
    assert reference(job).state_sha256 == reference(dataclasses.replace(job, recompute=False)).state_sha256
