"""Measured profiles are kept per job and machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.tiny_jobs import job, linear

from culm.cluster.prepare_run import inspect_layers, prepare_run
from culm.config import RunConfig
from culm.plan.model.model_profile import Profile
from culm.runtime.compute import profile_cache
from culm.runtime.compute.profile_cache import cached_profile, profile_path

JOB = job(layers=[linear] * 4, steps=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def measured() -> Profile:
    return cached_profile(JOB, inspect_layers(JOB).profile)


def test_a_second_run_of_a_job_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured()
    assert first.source == "measured"
    monkeypatch.setattr(profile_cache, "profile_layers", lambda *_, **__: pytest.fail("it was measured again"))
    assert measured() == first


def test_another_micro_batch_model_or_number_of_threads_is_measured_on_its_own() -> None:
    changed = [job(layers=[linear] * 4, micro_batch=4), job(layers=[linear] * 5), job(layers=[linear] * 4, threads=2)]
    paths = {profile_path(each, inspect_layers(each).profile) for each in (JOB, *changed)}
    assert len(paths) == 4


def test_a_damaged_file_is_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    path = profile_path(JOB, inspect_layers(JOB).profile)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert measured().source == "measured"
    assert "the cached profile is measured again" in caplog.text
    assert Profile.load(path).source == "measured"


def test_equal_layers_have_equal_costs_and_the_first_and_last_are_measured_on_their_own() -> None:
    layers = measured().layers
    assert layers[1] == layers[2]
    assert layers[0].input_s == 0 < layers[1].input_s


def test_only_schedules_that_depend_on_costs_measure_them(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare_run(JOB, RunConfig(stages=2, schedule="planned", strategy="none"))
    assert prepared.schedule_prediction["step_s"] > 0
    assert "planned: " in prepared.reason
    monkeypatch.setattr(profile_cache, "profile_layers", lambda *_, **__: pytest.fail("it was measured"))
    assert prepare_run(JOB, RunConfig(stages=2, strategy="none")).schedule_prediction == {}


def test_jobs_that_clip_gradients_say_what_it_costs_that_stages_step_together() -> None:
    clipped = job(layers=[linear] * 4, steps=2, clip_norm=1.0)
    prepared = prepare_run(clipped, RunConfig(stages=2, schedule="planned", max_activations=8, strategy="none"))
    assert prepared.schedule_prediction["synchronous_step_cost"] >= 0
    assert "stages make the optimizer step together, which makes a step" in prepared.reason
