"""The names of `culm`: typed for editors, imported when they are used, and not shadowed by packages."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.docs.markdown import ROOT

import culm
import culm.plan
import culm.schedule
from culm.cli import root_click_command


def test_importing_culm_imports_neither_torch_nor_the_functions() -> None:
    code = "import culm, sys; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    imported = ended.stdout.split()
    assert [name for name in ("torch", "numpy", "msgspec", "typer", "asyncio") if name in imported] == []
    assert not {
        f"culm.{name}" for name in ("training", "launching", "running_jobs", "run_results", "background_services")
    } & {*imported}


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


def test_every_command_has_a_row_in_the_table_of_functions() -> None:
    """Except those that test culm itself, which docs/limits.md names."""
    page = (ROOT / "docs" / "job.md").read_text()
    rows = set(re.findall(r"^\| `culm (\w+)", page, re.MULTILINE))
    assert {*root_click_command().commands} - rows == {"bench", "soak"}
    functions = set(re.findall(r"^\| `culm .*?` \| `culm\.(\w+)\(", page, re.MULTILINE))
    assert functions == {name for name in culm._LAZY if inspect.isfunction(getattr(culm, name))}


def test_the_expressions_of_the_table_for_plans_and_schedules_work() -> None:
    plan = culm.plan.plan_greedy(culm.plan.PlanCase(pipelines=2, stages=3, micro_batches=8))
    assert plan.step_time >= plan.lower_bound
    drawn = culm.schedule.generate_plan("1f1b", pipelines=1, stages=4, micro_batches=8)
    assert culm.schedule.render_text(culm.schedule.time_plan(drawn, culm.schedule.UNIT_COSTS))
