"""`culm down` where the engine does not answer, or is gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from culm.cli import main
from culm.machines.launch_order import LaunchOrder
from culm.machines.launch_registry import RegisteredLaunch, known_launches
from culm.machines.machine_provider import MachineRequest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULM_HOME", str(tmp_path / "home"))


def launch_on_a_host_that_is_gone(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\necho no route >&2\nexit 255\n")
    ssh.chmod(0o700)
    options = {"hosts": "a", "ssh": str(ssh)}
    order = LaunchOrder(
        launch="gpt-1", job="gpt", provider="hosts", options=options, requests=(MachineRequest(count=1),)
    )
    registered = RegisteredLaunch("gpt", order, 1)
    (registered.folder / "provider" / "used").write_text("a\n")
    registered.close(forget=False)


def down(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["down", *arguments])
    return ended.value.code


def test_a_launch_stays_in_the_list_until_its_engine_answers_or_it_is_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch_on_a_host_that_is_gone(tmp_path)
    assert down("gpt") == 1
    said = capsys.readouterr()
    assert "gpt: a cannot be reached (no route), and an agent may run there" in said.out
    assert "repeat culm down when the engine answers, or add --forget if it is gone" in said.err
    assert [launch.record.job for launch in known_launches()] == ["gpt"]
    assert down("gpt", "--forget") == 0
    assert "gpt is forgotten" in capsys.readouterr().out
    assert known_launches() == []
