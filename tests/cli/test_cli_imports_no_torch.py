"""Commands start quickly: they import torch, and the modules of other commands, only if they need them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import culm
from culm.cli import main, root_click_command

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


def test_help_imports_no_command() -> None:
    code = "import sys, culm.cli as cli\ntry: cli.main(['--help'])\nexcept SystemExit: print('|', *sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    imported = ended.stdout.rpartition("|")[2].split()
    assert "culm.cli.error_reporting" in imported
    assert [name for name in imported if name.endswith("_command") or name in ("asyncio", "msgspec", "numpy")] == []


def test_every_command_can_be_imported_and_has_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    commands = root_click_command().commands
    assert [name for name, command in commands.items() if command.name != name or not command.help] == []
    with pytest.raises(SystemExit):
        main([])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in commands]
    assert shown == list(commands)
    assert max(map(len, lines)) <= 80


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"culm {culm.__version__}\n"


def test_without_a_command_all_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert all(command in shown for command in ("run", "profile", "schedule", "export", "bench"))
