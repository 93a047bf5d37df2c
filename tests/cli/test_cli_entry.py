"""The command as users start it, from the first import on."""

from __future__ import annotations

import builtins
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from culm.__main__ import main

from .command import CULM, JOBS, LIMIT_S, alive, below, children, culm, one_sentence

_import = builtins.__import__


@pytest.mark.parametrize("how", [KeyboardInterrupt(), ImportError("cannot load module more than once per process")])
def test_an_interrupt_before_the_command_is_there_is_told_in_a_word(
    how: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "culm.cli":
            how.__context__ = KeyboardInterrupt()
            raise how
        return _import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    with pytest.raises(SystemExit) as end:
        main()
    monkeypatch.undo()
    assert end.value.code == 130
    assert capsys.readouterr().err == "culm: interrupted\n"


def test_what_can_not_be_imported_for_another_reason_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "culm.cli":
            raise ImportError("no module named typer")
        return _import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match="typer"):
        main()


@pytest.mark.real
def test_verbs_that_compute_or_start_nodes_find_all_they_import(tmp_path: Path) -> None:
    run, profile, weights = tmp_path / "run", tmp_path / "profile.json", tmp_path / "model.safetensors"
    measured = culm("profile", JOBS, "--device", "cpu", "--out", str(profile), "--json")
    assert json.loads(measured.stdout)["layers"], measured.stderr
    trained = culm("run", JOBS, "--profile", str(profile), "--checkpoint-every", "2", "--out", str(run), "--json")
    assert json.loads(trained.stdout)["samples_lost"] == 0, trained.stderr
    exported = culm("export", str(run), str(weights))
    assert exported.stdout.startswith(f"{weights}: 8 tensors"), exported.stderr


@pytest.mark.real
def test_an_interrupt_before_the_nodes_are_up_ends_everything() -> None:
    process = subprocess.Popen([CULM, "run", JOBS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing torch and the job\n"
    while not (started := children(process.pid)):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert "interrupted" in one_sentence(said)
    assert not [pid for pid in started if alive(pid) or below(pid)]
