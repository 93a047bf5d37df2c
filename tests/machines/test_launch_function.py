"""`culm.launch`: what `culm launch` does, from Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.machines.launched_jobs import JOB

import culm
from culm.cli.launching import launch_command
from culm.config import LaunchOptions
from culm.job import load_job
from culm.machines.launch_registry import known_launches
from culm.testing import reference


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Launches and jobs of the test."""
    monkeypatch.setenv("CULM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A job of three steps that hurries."""
    (tmp_path / "hurry").touch()
    (tmp_path / "three.py").write_text(JOB.format(hurry=str(tmp_path / "hurry"), steps=3))
    return str(tmp_path / "three.py")


@pytest.mark.real
@pytest.mark.waits(8)
def test_a_launch_trains_on_machines_and_ends_them(
    file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = culm.RunConfig(pipelines=2, out=str(tmp_path / "run"))
    summary = culm.launch(
        file, config, on="local", address="127.0.0.1", nodes=2, overrides={"steps": 5}, progress=False
    )
    assert (summary.steps, summary.pipelines, summary.out) == (5, 2, str(tmp_path / "run"))
    assert summary.state_sha256 == reference(load_job(file, {"steps": "5"})).state_sha256
    assert capfd.readouterr().out == ""
    assert known_launches() == []


def test_arguments_are_those_of_the_command() -> None:
    """All fields of RunConfig that the command has are keyword arguments; one is for the config only."""
    assert set(get_type_hints(LaunchOptions)) == set(launch_command._FIELDS) - {"etcd_insecure"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"on": "nowhere"}, "there is no --on 'nowhere'"),
        ({"nodes": None}, "--nodes is missing"),
        ({"etcd": "http://a:1"}, "--etcd is given in the config: a launch decides it itself, leave it out"),
        ({"instances": "a"}, r"instances is 'a': use a sequence, as in instances=\['a'\]"),
        ({"zones": [1]}, "zones has 1: use names"),
        ({"environment": {"A": 1}}, "environment has 'A': 1, use strings"),
        ({"environment": {"A-B": "1"}}, "--env names 'A-B', which is no environment variable"),
        ({"provider_options": {"speed": "1"}}, "--option speed: local has no such option"),
        ({"max_price": 0.0}, "--max-price is 0: use dollars per hour above 0"),
        ({"overrides": {"stepz": 1}}, "stepz"),
        ({"stagez": 1}, "RunConfig has no field 'stagez'"),
        ({"job": lambda: None}, "job is of type function: other machines import the job"),
        ({"job": "nowhere.py"}, "there is no job file 'nowhere.py'"),
        ({"out": "used"}, "used"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_is_started(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "steps.jsonl").touch()
    request: dict[str, Any] = {"job": file, "on": "local", "nodes": 2} | arguments
    with pytest.raises(culm.CulmError, match=sentence) as raised:
        culm.launch(**request)
    assert raised.value.exit_code == 2
    assert known_launches() == []


def test_what_a_launch_could_not_keep_is_a_warning_at_its_caller(file: str) -> None:
    with (
        pytest.warns(UserWarning, match="--env HF_TOKEN is not kept secret") as found,
        pytest.raises(culm.CulmError, match="there is no --on 'nowhere'"),
    ):
        culm.launch(file, on="nowhere", nodes=2, environment={"HF_TOKEN": "a"})
    assert [warning.filename for warning in found] == [__file__]
