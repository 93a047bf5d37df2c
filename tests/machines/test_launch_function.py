"""`culm.launch`: what `culm launch` does, from Python."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.machines.launched_jobs import JOB

import culm
from culm.cli.launching import launch_command
from culm.config import LaunchOptions
from culm.job import load_job
from culm.machines.head_registry import HeadLaunch, known_head_launches, note_head_launch
from culm.machines.launch_order import LaunchOrder
from culm.machines.launch_registry import RegisteredLaunch, known_launches
from culm.machines.machine_provider import MachineRequest
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


@pytest.mark.real
@pytest.mark.waits(8)
def test_a_detached_launch_is_listed_stopped_and_ended(file: str, tmp_path: Path) -> None:
    (tmp_path / "hurry").unlink()
    options: dict[str, Any] = {"on": "local", "address": "127.0.0.1", "overrides": {"steps": 10_000}}
    name = culm.launch(file, detach=True, nodes=2, pipelines=2, out=tmp_path / "run", **options)
    (listed,) = culm.list_jobs()
    assert (listed.job, listed.on, listed.wanted, listed.supervised, listed.problem) == (name, "local", 2, True, "")
    culm.down(name)
    assert culm.list_jobs() == []
    assert known_launches() == []
    with pytest.raises(culm.CulmError):
        culm.attach(name, progress=False)  # it was ended early
    culm.down(everything=True)


def test_down_ends_what_is_left_of_a_launch(caplog: pytest.LogCaptureFixture) -> None:
    order = LaunchOrder(launch="gpt-1a2b3c", job="gpt", provider="local", requests=(MachineRequest(count=1),))
    RegisteredLaunch("gpt", order, 4).close(forget=False)
    (listed,) = culm.list_jobs()
    assert (listed.job, listed.launch, listed.wanted, listed.supervised) == ("gpt", "gpt-1a2b3c", 4, False)
    with pytest.raises(culm.CulmError, match="there is no launch 'gtp' on this machine: did you mean gpt"):
        culm.down("gtp")
    with caplog.at_level("INFO", "culm"):
        culm.down("gpt")
    assert "nothing of gpt (gpt-1a2b3c on local) is left" in caplog.text
    assert culm.list_jobs() == []


@pytest.mark.parametrize("arguments", [{}, {"job": "gpt", "everything": True}])
def test_down_needs_a_name_or_everything(arguments: dict[str, Any]) -> None:
    with pytest.raises(culm.CulmError, match="name a job, or pass everything=True"):
        culm.down(**arguments)


def test_launches_on_heads_are_listed_and_ended_there(tmp_path: Path) -> None:
    row = {"job": "gpt", "launch": "gpt-1", "on": "hosts", "wanted": 2, "running": 1, "pending": 1, "usd_per_h": None}
    row |= {"seconds": 1.0, "supervised": True, "problem": "", "head": ""}
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/sh\nfor command; do :; done\ncase $command in *list*) echo '[{json.dumps(row)}]';; "
        "*) echo culm: no answer >&2; exit $(cat code);; esac\n".replace("$(cat code)", f"$(cat {tmp_path}/code)")
    )
    ssh.chmod(0o700)
    note_head_launch(HeadLaunch("gpt-1", "gpt", "me@stays", (str(ssh),), ("culm",), time.time()))
    (listed,) = culm.list_jobs()
    assert (listed.job, listed.running, listed.pending, listed.head) == ("gpt", 1, 1, "me@stays")
    for code in (1, 2):
        (tmp_path / "code").write_text(f"{code}\n")
        with pytest.raises(culm.CulmError, match="machines may be left of gpt"):
            culm.down("gpt")
    (tmp_path / "code").write_text("0\n")
    culm.down("gpt-1")
    assert known_head_launches() == []


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
