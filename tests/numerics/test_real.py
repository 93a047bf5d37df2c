"""Real processes over real sockets learn what the simulated cluster and the reference do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import culm
from culm.job import Job
from culm.providers.local import LocalNursery
from culm.testing import reference, simulate

from .jobs import JOBS, but, everything

pytestmark = pytest.mark.real
exact = but(everything, exact=True)


def test_two_pipelines_of_three_stages_equal_the_simulation_and_the_reference(nursery: LocalNursery) -> None:
    summary = culm.train(exact, pipelines=2, stages=3, nursery=nursery)
    assert summary.state_sha256 == reference(exact).state_sha256
    assert summary.state_sha256 == simulate(exact, pipelines=2, stages=3).state_sha256
    assert (summary.samples, summary.samples_lost, summary.samples_duplicated) == (summary.samples_expected, 0, 0)


@pytest.mark.parametrize(
    "name", ["everything", "views", "tuples recompute", "attention bf16", "complex", "in place", "gpt tied"]
)
def test_one_pipeline_with_a_split_backward_equals_the_reference(name: str, nursery: LocalNursery) -> None:
    """Every layer is a stage: every tensor and every gradient goes over a socket."""
    job = JOBS[name]
    wanted = reference(job)
    summary = culm.train(job, stages=len(job.layers), schedule="zb", nursery=nursery)
    assert summary.state_sha256 == wanted.state_sha256
    assert summary.final_loss == wanted.losses[-1]


@pytest.fixture(scope="module")
def interrupted(nursery: LocalNursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended after half of its steps."""
    out = tmp_path_factory.mktemp("runs") / "half"
    culm.train(but(exact, steps=4), pipelines=2, stages=3, out=str(out), checkpoint_every=3, nursery=nursery)
    return out


@pytest.mark.parametrize(
    "shape", [{"stages": 2, "schedule": "interleaved"}, {"pipelines": 3, "schedule": "zb"}], ids=str
)
def test_a_run_resumes_in_another_shape_as_if_it_had_not_been_interrupted(
    shape: dict[str, int], interrupted: Path, nursery: LocalNursery, tmp_path: Path
) -> None:
    whole, out = but(exact, steps=8), shutil.copytree(interrupted, tmp_path / "run")
    resumed = culm.train(whole, resume=str(out), nursery=nursery, **shape)  # type: ignore[arg-type]
    wanted = reference(whole)
    assert (resumed.steps, resumed.state_sha256) == (8, wanted.state_sha256)
    for name, value in resumed.weights().items():
        assert torch.equal(value, wanted.snapshot.tensors[name]), name


def test_a_fast_run_resumes_with_the_moments_of_adamw(nursery: LocalNursery, tmp_path: Path) -> None:
    job, out = but(JOBS["gpt tied"], steps=4), str(tmp_path / "run")
    culm.train(but(job, steps=2), stages=2, out=out, nursery=nursery)
    resumed = culm.train(job, stages=3, schedule="zb", resume=out, nursery=nursery)
    assert resumed.state_sha256 == reference(job).state_sha256


def stopping(job: Job, last: int) -> tuple[Job, list[int]]:
    seen: list[int] = []

    def hook(metrics: object) -> object:
        assert isinstance(metrics, dict)
        seen.append(metrics["step"])
        return culm.STOP if metrics["step"] == last else None

    return but(job, on_step=hook), seen


def test_a_hook_stays_in_this_process_and_can_stop_the_run(nursery: LocalNursery) -> None:
    job, seen = stopping(but(exact, steps=9), last=1)
    summary = culm.train(job, pipelines=2, stages=2, nursery=nursery)
    assert seen == [0, 1]
    assert summary.state_sha256 == reference(but(exact, steps=2)).state_sha256
