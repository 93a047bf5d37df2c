"""Imports go one way: errors <- schedule <- plan <- strategies <- sim, cluster; and none of the first imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import culm

PACKAGE = Path(culm.__file__).parent
ALLOWED = {
    "schedule": {"errors", "text_format", "schedule"},
    "plan": {"errors", "text_format", "schedule", "plan"},
    "strategies": {"errors", "text_format", "schedule", "plan", "strategies"},
}


def module_level_imports(file: Path) -> Iterator[str]:
    """The sub-packages of culm that a file imports when it is imported itself."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, rest = node.module.partition(".")
            if package == "culm":
                yield from [rest.partition(".")[0]] if rest else [alias.name for alias in node.names]


def test_lower_packages_do_not_import_higher_ones() -> None:
    for package, allowed in ALLOWED.items():
        for file in (PACKAGE / package).rglob("*.py"):
            assert set(module_level_imports(file)) <= allowed, file


def test_strategies_are_imported_without_torch() -> None:
    code = "import sys; import culm.strategies, culm.sim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_of_strategies_are_compared_nowhere_else() -> None:
    """Code asks the strategy object. A comparison with a name would leave out strategies that users define."""
    names = {"none", "checkpoint", "drop", "shadow", "shadow-lazy", "reroute", "migrate", "templates", "auto"}
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare) and "strategy" in ast.unparse(node.left):
                values = {
                    value.value
                    for part in node.comparators
                    for value in ast.walk(part)
                    if isinstance(value, ast.Constant)
                }
                assert not names & values, f"{file}:{node.lineno}: {ast.unparse(node)}"
