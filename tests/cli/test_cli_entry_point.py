"""The command as users start it, from the first import on."""

from __future__ import annotations

import builtins
import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.cli.cli_process import CULM, JOBS, LIMIT_S, alive, children, culm, descendants, one_sentence

from culm.__main__ import main

_import = builtins.__import__


@pytest.mark.parametrize("how", [KeyboardInterrupt(), ImportError("cannot load module more than once per process")])
def test_an_interrupt_before_the_command_is_loaded_is_reported(
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


def test_what_cannot_be_imported_for_another_reason_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(name: str, *arguments: Any, **more: Any) -> Any:
        if name == "culm.cli":
            raise ImportError("no module named typer")
        return _import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match="typer"):
        main()


class Run(NamedTuple):
    folder: Path
    imported: list[str]
    """By its last worker, after its fork."""
    shown: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that was started anew, on a terminal."""
    folder = tmp_path_factory.mktemp("anew")
    ours, theirs = pty.openpty()
    options = ("--pipelines", "2", "--checkpoint-every", "2", "--out", str(folder / "run"))
    process = subprocess.Popen(
        [CULM, "run", f"{JOBS}:importing", *options],
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"CULM_TEST_IMPORTED": str(folder / "imported")},
    )
    os.close(theirs)
    shown = b"".join(_read(ours)).decode()
    os.close(ours)
    assert process.wait(LIMIT_S) == 0, shown
    assert json.loads((folder / "run" / "summary.json").read_text())["samples_lost"] == 0
    return Run(folder / "run", (folder / "imported").read_text().split(), shown)


def _read(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # how a terminal ends on Linux
            return
        if not data:
            return
        yield data


@pytest.mark.real
def test_a_node_imports_next_to_nothing_of_its_own(run: Run) -> None:
    imported = [name for name in run.imported if not name.startswith("culm.")]
    assert len(imported) < 20, imported


@pytest.mark.real
def test_on_a_terminal_prints_stand_above_the_bar(run: Run) -> None:
    assert "a layer speaks [not markup]" in run.shown
    assert "steps 4/4" in run.shown
    assert "each counted once" in run.shown


@pytest.mark.real
def test_what_was_trained_is_exported_by_a_command_of_its_own(run: Run, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    made = culm("export", str(run.folder), str(weights))
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"{weights}: 8 tensors")


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
    assert not [pid for pid in started if alive(pid) or descendants(pid)]
