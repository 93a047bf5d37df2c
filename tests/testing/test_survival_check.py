"""`survives` accepts a run with the expected result and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.testing.small_job import job

from culm.testing import Deadlock, Faults, SimulatedRun, reference, simulate, survives
from culm.testing.survival_check import differences

SHAPE: dict[str, Any] = {"pipelines": 2, "stages": 2}


def test_a_run_with_the_same_result_has_survived() -> None:
    faults = Faults().pause(1, at="1B0", step=1, seconds=1.0).reorder(seconds=0.02)
    (found,) = survives(job(), faults=faults, **SHAPE)
    assert found.faults == faults
    assert found.run.state_sha256 == reference(job()).state_sha256
    assert {injected.fault for injected in found.run.injected_faults} == set(faults.all)


def test_several_schedules_and_several_seeds_are_all_tried() -> None:
    schedules = [Faults().reorder(), Faults().slow_link(latency=0.1)]
    found = survives(job(), faults=schedules, seeds=(3, 4), **SHAPE)
    assert [(survived.faults, survived.seed) for survived in found] == [(f, s) for f in schedules for s in (3, 4)]


def test_without_faults_random_ones_are_drawn_from_the_seeds() -> None:
    first, second = (survives(job(), seeds=range(5), strategy="none", **SHAPE) for _ in range(2))
    assert [str(survived.faults) for survived in first] == [str(survived.faults) for survived in second]
    assert len({str(survived.faults) for survived in first}) > 1


def test_runs_with_files_use_separate_folders(tmp_path: Path) -> None:
    survives(job(), faults=Faults().slow_disk(0, seconds=1), out=str(tmp_path), checkpoint_every=2, **SHAPE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failure-free", "run-0"]


def test_a_run_that_ends_with_an_error_has_not_survived_and_reports_its_history() -> None:
    faults = Faults().kill(1, at="1B0", step=1)
    with pytest.raises(AssertionError) as caught:
        survives(job(), faults=faults, strategy="none", **SHAPE)
    text = str(caught.value)
    assert text.startswith("the run ended with NodeLost: node 1 was lost")
    assert f"{faults}, seed 0:" in text
    assert "node 1   killed" in text


def test_a_run_that_hangs_has_not_survived() -> None:
    with pytest.raises(AssertionError, match="the run ended with Deadlock") as caught:
        survives(job(), faults=Faults().drop_message(0, 1, kind="frame"), strategy="none", **SHAPE)
    assert isinstance(caught.value.__cause__, Deadlock)


def test_a_fault_that_was_not_injected_fails_the_check() -> None:
    with pytest.raises(AssertionError, match=r"the moment of pause\(.*\) never came"):
        survives(job(), faults=Faults().pause(1, at="0F0", seconds=1), **SHAPE)


# Comparison of results


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    return simulate(job(), **SHAPE)


def with_summary(run: SimulatedRun, **summary: Any) -> SimulatedRun:
    return SimulatedRun({**run.summary, **summary}, run.losses, run.snapshot.copy())


def test_a_different_loss_of_a_step_is_named(run: SimulatedRun) -> None:
    off = SimulatedRun(run.summary, run.losses, run.snapshot.copy(), reported_losses=((0, run.losses[0]), (1, 7.5)))
    exact = dataclasses.replace(job(), exact=True)
    assert list(differences(exact, off, run)) == [f"the loss of step 1 is 7.5, not {run.losses[1]}"]


def test_equal_runs_have_no_differences(run: SimulatedRun) -> None:
    assert list(differences(job(), run, run)) == []
    assert list(differences(job(), run, reference(job()))) == []


@pytest.mark.parametrize(
    ("summary", "sentence"),
    [
        ({"samples_lost": 2}, "samples_lost is 2"),
        ({"samples_duplicated": 4}, "samples_duplicated is 4"),
        ({"samples": 22}, "22 samples in 3 steps, not 24"),
        ({"steps": 2}, "24 samples in 2 steps, not 24"),
        ({"state_sha256": "other"}, "the state is not the same to the last bit: its digest differs"),
        ({"final_loss": 0.0}, "the final loss is 0.0, not "),
    ],
)
def test_every_difference_of_the_summary_is_named(run: SimulatedRun, summary: dict[str, Any], sentence: str) -> None:
    (found,) = differences(job(), with_summary(run, **summary), run)
    assert found.startswith(sentence)


def test_nan_losses_are_equal(run: SimulatedRun) -> None:
    nan = float("nan")
    skipped = dataclasses.replace(
        with_summary(run, final_loss=nan, evaluations={"1": nan}), losses=[nan], reported_losses=((0, nan),)
    )
    assert list(differences(job(), skipped, skipped)) == []


@pytest.mark.parametrize(("relative", "same"), [(1e-6, True), (1e-2, False), (float("nan"), False)])
@pytest.mark.parametrize("name", ["2.weight", "optimizer.2.weight.exp_avg"])
def test_without_exact_tensors_may_differ_by_the_order_of_sums(
    run: SimulatedRun, name: str, relative: float, same: bool
) -> None:
    other = with_summary(run, state_sha256="other")
    other.snapshot.tensors[name] += relative * other.snapshot.tensors[name].abs().max()
    found = list(differences(job(exact=False), other, run))
    assert found == [] if same else found[0].startswith(f"{name} is off by ")


def test_a_missing_tensor_is_a_difference(run: SimulatedRun) -> None:
    other = with_summary(run)
    del other.snapshot.parameters["0.bias"]
    assert list(differences(job(exact=False), other, run)) == ["it has other tensors: ['0.bias']"]


def test_a_different_optimizer_step_count_is_a_difference(run: SimulatedRun) -> None:
    other = with_summary(run)
    other.snapshot.moments["optimizer.0.weight.step"] += 1
    assert list(differences(job(exact=False), other, run)) == ["optimizer.0.weight.step is off by 1"]
