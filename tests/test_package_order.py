"""The list of packages in `culm/__init__.py`: complete, and imports point one way along it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import culm

ROOT = Path(culm.__file__).parent
ORDER = re.findall(r"^    (\w+)/? +\S", culm.__doc__ or "", re.MULTILINE)
EXCEPTIONS = {
    ("config", "culm.cluster.node_faults"),
    ("config", "culm.cluster.timeouts"),
    ("config", "culm.transport.frames.encryption_policy"),
    ("providers", "culm.machines.job_archive"),
    ("providers", "culm.machines.join_token"),
    ("providers", "culm.machines.launch_order"),
    ("providers", "culm.machines.launched_run"),
}
"""Imports against the order: from a package, of a module."""


def imported_modules(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The modules of culm that a module imports when it is imported itself."""
    for node in statements:
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported_modules([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from imported_modules(node.body)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("culm."))
        elif isinstance(node, ast.ImportFrom) and node.module == "culm":
            yield from (f"culm.{alias.name}" for alias in node.names if alias.name in ORDER)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("culm."):
            yield node.module or ""


def test_the_list_names_every_package() -> None:
    names = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert set(ORDER) == names - {"__init__", "__main__"}
    assert len(ORDER) == len(set(ORDER))


def test_imports_point_one_way() -> None:
    against = set()
    for file in ROOT.rglob("*.py"):
        package = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if package in ORDER:
            for module in imported_modules(ast.parse(file.read_text()).body):
                if ORDER.index(module.split(".")[1]) > ORDER.index(package):
                    against.add((package, module))
    assert against == EXCEPTIONS
