"""Every command and snippet of the README runs as written, in order, in a fresh folder, with the wheel of culm."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from tests.docs.markdown import ROOT, CodeBlock, code_blocks

import culm

LIMIT_S = 1200
LANGUAGES = ("sh", "python", "text")
NOT_RUN = {
    "installs packages from the network",
    "takes minutes",
    "needs a second machine",
    "needs three hosts",
    "serves until Ctrl-C",
}
"""The only reasons for which a block of the README may be left out here."""

README = (ROOT / "README.md").read_text()


def test_every_block_is_run_or_says_why_not() -> None:
    blocks = code_blocks(README)
    assert {block.language for block in blocks} <= set(LANGUAGES)
    assert {block.not_run for block in blocks if block.not_run is not None} <= NOT_RUN
    assert all(block.not_run is None for block in blocks if block.language == "python")
    assert sum(block.not_run is None for block in blocks) >= sum(block.not_run is not None for block in blocks)


def test_every_extra_is_listed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(listed) == sorted(extras.keys() - {"dev"})


@pytest.mark.real
@pytest.mark.waits(40)
def test_blocks_run_as_written_and_in_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = _environment(tmp_path)
    output = ""
    for number, block in enumerate(code_blocks(README)):
        if block.language == "text":
            assert _unexpected_lines(block.body, output) == [], output
        elif block.not_run is None:
            output = _run(block, number, tmp_path, environment)


def _unexpected_lines(excerpt: str, output: str) -> list[str]:
    """The lines of an excerpt that the command above it did not print. Figures that differ between runs are ignored."""
    printed = {_without_figures(line) for line in output.splitlines()}
    return [line for line in excerpt.splitlines() if _without_figures(line) not in printed]


def _without_figures(line: str) -> str:
    line = re.sub(r"sha256 \w+", "sha256 #", line.strip())
    line = re.sub(r"\d+(\.\d+)?", "#", line)
    return re.sub(r"(nothing|# actions?) run again", "# actions run again", line)


def test_the_terminal_excerpt_is_what_the_run_says() -> None:
    """The excerpt shows one run: the node that `--kill` names is lost, and the run goes on to its last step."""
    command, excerpt = next(
        (first.body, second.body)
        for first, second in zip(code_blocks(README), code_blocks(README)[1:], strict=False)
        if second.language == "text"
    )
    node, step, steps = (_number(pattern, command) for pattern in ("node=", "step=", "--steps "))
    assert f"node {node} " in excerpt
    assert f"step {step} " in excerpt
    assert f"steps {steps}/{steps} " in excerpt


def _number(name: str, text: str) -> int:
    match = re.search(rf"{name}(\d+)", text)
    assert match is not None, f"{name} is not in {text}"
    return int(match[1])


def _environment(folder: Path) -> dict[str, str]:
    """The environment of a user who has installed the wheel: `culm` and `python` use its files, and the other packages
    of the tests. Without hatchling, which the extra `dev` installs, they use the source."""
    programs, source = folder / ".programs", ROOT / "src"
    if importlib.util.find_spec("hatchling") is not None:
        source = folder / ".installed"
        zipfile.ZipFile(_build_wheel(folder / ".dist")).extractall(source)
    programs.mkdir()
    _write_program(programs / "culm", f'exec {sys.executable} -m culm "$@"')
    _write_program(programs / "python", f'exec {sys.executable} "$@"')
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(source), "COLUMNS": "120"}


def _build_wheel(folder: Path) -> Path:
    """Build the wheel as `python -m build --wheel` does, with the packages of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("culm-*.whl")
    return wheel


def test_the_wheel_has_all_files_of_the_package(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built by hatchling")
    built = zipfile.ZipFile(_build_wheel(tmp_path))
    source = ROOT / "src"
    expected = {str(path.relative_to(source)) for path in (source / "culm").rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    info = f"culm-{culm.__version__}.dist-info"
    assert {name for name in built.namelist() if not name.startswith(info)} == expected
    assert "culm = culm.__main__:main" in built.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in built.namelist()


def _write_program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _run(block: CodeBlock, number: int, folder: Path, environment: dict[str, str]) -> str:
    """Run a block in a shell that stops at the first error, or as a Python file. Returns what it printed."""
    if block.language == "python":
        file = folder / f"block_{number}.py"
        file.write_text(block.body)
        command = ["python", str(file)]
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.body]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{block.body}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr
