"""The names of `culm`: typed for editors, imported when they are used, and not shadowed by packages."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import culm


def test_importing_culm_imports_neither_torch_nor_the_functions() -> None:
    code = "import culm, sys; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = ended.stdout.split()
    assert [name for name in ("torch", "numpy", "msgspec", "typer", "asyncio") if name in imported] == []
    assert not {f"culm.{name}" for name in ("training", "launching", "running_jobs", "run_results")} & {*imported}


def test_every_lazy_name_is_imported_for_type_checkers_from_the_same_module() -> None:
    tree = ast.parse(Path(culm.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    found = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert found == culm._LAZY | {"hf": "culm"}
    assert culm._LAZY.keys() < {*culm.__all__} <= {*dir(culm)}


@pytest.mark.parametrize("name", sorted(culm._LAZY))
def test_every_name_is_a_documented_class_or_a_function_with_types(name: str) -> None:
    found = getattr(culm, name)
    assert found.__doc__
    assert not isinstance(found, ModuleType)
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        assert signature.return_annotation is not signature.empty
        assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())


def test_no_package_takes_the_name_of_a_function() -> None:
    root = Path(culm.__file__).parent
    assert {path.stem for path in root.iterdir()} & {*culm._LAZY} == set()
