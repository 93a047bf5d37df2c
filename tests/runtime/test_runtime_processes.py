"""Real processes over sockets train the same as the simulated cluster and the reference."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.cached_runs import reference_result
from tests.runtime.sample_jobs import JOBS, everything, job_with

import culm
from culm.job import Job
from culm.observe.step_metrics import StepMetrics
from culm.providers.local_provider import ForkServerClient
from culm.testing import simulate

pytestmark = pytest.mark.real
exact = job_with(everything, exact=True)
half, whole = job_with(exact, steps=4), job_with(exact, steps=8)


@pytest.fixture(scope="module")
def interrupted(fork_server: ForkServerClient, tmp_path_factory: pytest.TempPathFactory) -> culm.Summary:
    """A run with a folder that ended after half of its steps."""
    out = tmp_path_factory.mktemp("runs") / "half"
    return culm.train(half, pipelines=2, stages=3, out=str(out), checkpoint_every=3, fork_server=fork_server)


def test_two_pipelines_of_three_stages_equal_the_simulation_and_the_reference(interrupted: culm.Summary) -> None:
    summary = interrupted
    assert summary.state_sha256 == reference_result(half).state_sha256
    assert summary.state_sha256 == simulate(half, pipelines=2, stages=3).state_sha256
    assert (summary.samples, summary.samples_lost, summary.samples_duplicated) == (summary.samples_expected, 0, 0)


def check_split(job: Job, fork_server: ForkServerClient, out: str | None = None) -> None:
    """One pipeline with a split backward equals the reference where every layer is a stage."""
    summary = culm.train(job, stages=len(job.layers), schedule="zb", out=out, fork_server=fork_server)
    assert summary.state_sha256 == reference_result(job).state_sha256
    assert summary.final_loss == reference_result(job).losses[-1]


@pytest.mark.parametrize("name", ["everything", "tuples recompute", "attention bf16", "complex"])
def test_one_pipeline_with_a_split_backward_equals_the_reference(name: str, fork_server: ForkServerClient) -> None:
    """Every layer is a stage: every tensor and every gradient goes over a socket."""
    check_split(JOBS[name], fork_server)


@pytest.mark.parametrize(
    "shape", [{"stages": 2, "schedule": "interleaved"}, {"pipelines": 3, "schedule": "zb"}], ids=str
)
def test_a_run_resumes_in_another_shape_as_if_it_had_not_been_interrupted(
    shape: dict[str, int], interrupted: culm.Summary, fork_server: ForkServerClient, tmp_path: Path
) -> None:
    out = shutil.copytree(str(interrupted.out), tmp_path / "run")
    resumed = culm.train(whole, resume=str(out), fork_server=fork_server, **shape)  # type: ignore[arg-type]
    wanted = reference_result(whole)
    assert (resumed.steps, resumed.state_sha256) == (8, wanted.state_sha256)
    for name, value in resumed.weights().items():
        assert torch.equal(value, wanted.snapshot.tensors[name]), name


def test_a_fast_run_with_a_split_backward_resumes_with_the_moments_of_adamw(
    fork_server: ForkServerClient, tmp_path: Path
) -> None:
    job, out = job_with(JOBS["gpt tied"], steps=4), str(tmp_path / "run")
    check_split(JOBS["gpt tied"], fork_server, out)
    resumed = culm.train(job, stages=2, resume=out, fork_server=fork_server)
    assert resumed.state_sha256 == reference_result(job).state_sha256


def stopping(job: Job, last: int) -> tuple[Job, list[int]]:
    seen: list[int] = []

    def hook(metrics: StepMetrics) -> object:
        seen.append(metrics["step"])
        return culm.STOP if metrics.step == last else None

    return job_with(job, on_step=hook), seen


def test_a_hook_stays_in_this_process_and_can_stop_the_run(fork_server: ForkServerClient) -> None:
    job, seen = stopping(job_with(exact, steps=9), last=1)
    summary = culm.train(job, stages=2, fork_server=fork_server)
    assert seen == [0, 1]
    assert summary.state_sha256 == reference_result(exact).state_sha256
