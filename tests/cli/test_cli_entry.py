"""The command as users start it, from the first import on."""

from __future__ import annotations

import builtins
import json
import signal
import subprocess
import sys
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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run that was started anew, and what its last worker imported after its fork."""
    folder = tmp_path_factory.mktemp("anew")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CULM_TEST_IMPORTED", str(folder / "imported"))
        options = ("--pipelines", "2", "--checkpoint-every", "2", "--out", str(folder / "run"), "--json")
        trained = culm("run", f"{JOBS}:importing", *options)
    assert json.loads(trained.stdout)["samples_lost"] == 0, trained.stderr
    return folder / "run", (folder / "imported").read_text().split()


@pytest.mark.real
def test_a_node_imports_next_to_nothing_of_its_own(run: tuple[Path, list[str]]) -> None:
    imported = [name for name in run[1] if not name.startswith("culm.")]
    assert len(imported) < 20, imported


VERBS = """
import os, runpy, sys
import torch  # it takes seconds; all else each of them has to find by itself
for words in sys.argv[2:]:
    if not os.fork():
        sys.argv[:] = [sys.argv[1], *words.split()]
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert os.wait()[1] == 0, words
"""


@pytest.mark.real
def test_verbs_that_compute_find_all_they_import(run: tuple[Path, list[str]], tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    words = [f"profile {JOBS} --device cpu --json", f"export {run[0]} {weights}"]
    made = subprocess.run([sys.executable, "-c", VERBS, CULM, *words], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    measured, exported = made.stdout.splitlines()
    assert json.loads(measured)["layers"]
    assert exported.startswith(f"{weights}: 8 tensors")


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
