"""Commands that need no tensors start in a blink: they never import torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import culm
from culm.cli import main

_WITHOUT_TORCH = """
import json, sys
from culm.cli import main
for arguments, code in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        assert end.code == code, f"{arguments}: {end.code}"
    else:
        raise AssertionError(f"{arguments} did not end")
    assert "torch" not in sys.modules, f"{arguments}: torch was imported"
"""
PURE: list[tuple[list[str], int]] = [
    (["--help"], 0),
    (["--version"], 0),
    (["run", "--help"], 0),
    (["schedule", "zb", "--stages", "2"], 0),
    (["run", "nowhere.py"], 2),
    (["verify", "nowhere"], 2),
    (["run", __file__, "--schedule", "1fb1"], 2),
]


def test_pure_commands_and_early_refusals_do_not_import_torch() -> None:
    """One after the other in one process: what any of them imports is seen."""
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, json.dumps(PURE)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"culm {culm.__version__}\n"


def test_without_a_verb_all_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(verb in shown for verb in ("run", "profile", "schedule", "export", "bench"))
