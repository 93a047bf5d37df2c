"""The structure of culm.runtime: a step is read from top to bottom, and no object reaches through another one.

Checked on the syntax tree of the modules directly in culm/runtime (what runs inside layers is in runtime/compute).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import culm

RUNTIME = Path(culm.__file__).parent / "runtime"
MODULES = sorted(path.stem for path in RUNTIME.glob("*.py") if path.stem != "__init__")
MAX_HOPS = 2
"""Attributes after the first name of a chain: `self._state.replicas` has two."""
CONTAINER_METHODS = {
    "add", "append", "clear", "discard", "extend", "get", "items", "keys", "pop", "popleft", "remove", "setdefault",
    "split", "tolist", "update", "values",
}  # fmt: skip
"""Called on a value at the end of a chain; they do not lead to another component."""
STEP_PATH = [
    "worker",
    "train_loop",
    "replay",
    "handoff",
    "evaluation",
    "executor",
    "shadow_replicas",
    "replica_builder",
    "checkpoint_io",
    "optimizer_step",
    "grad_reduce",
    "epoch_context",
    "worker_state",
    "messages",
    "epoch",
]
"""A module may import, at run time or for types, only modules that come after it in this list (or are not in it)."""
KNOWN_WRITES = {"microbatch_stats"}
"""Modules that write attributes of another object: statistics set bounds and examples of their segment."""


def _tree(module: str) -> ast.Module:
    return ast.parse((RUNTIME / f"{module}.py").read_text())


def _chain(node: ast.Attribute) -> list[str]:
    """['self', '_state', 'replicas'] for self._state.replicas; [] where the chain does not start with a name."""
    parts = []
    here: ast.expr = node
    while isinstance(here, ast.Attribute):
        parts.append(here.attr)
        here = here.value
    return [here.id, *reversed(parts)] if isinstance(here, ast.Name) else []


def _written_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned or deleted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node


def foreign_writes(tree: ast.AST) -> list[str]:
    """Writes to attributes of objects other than `self`, such as `executor.shadows = ...`."""
    writes = {
        node.lineno: ".".join(_chain(node)) for node in _written_attributes(tree) if _chain(node)[:-1] != ["self"]
    }
    return [f"line {line}: {chain}" for line, chain in sorted(writes.items())]


def long_chains(tree: ast.AST) -> list[str]:
    """Chains that lead through a component to a part of another one, such as `self._context.transport.mailbox.put`."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    chains = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            _, *hops = _chain(node) or [""]
            if hops and hops[-1] in CONTAINER_METHODS:
                hops = hops[:-1]
            if len(hops) > MAX_HOPS:
                chains.append(f"line {node.lineno}: {'.'.join(_chain(node))}")
    return chains


def imported_modules(tree: ast.AST) -> set[str]:
    """The modules directly in culm.runtime that are imported."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "culm.runtime":
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("culm.runtime."):
            names.add(node.module.split(".")[2])
    return names


@pytest.mark.parametrize("module", MODULES)
def test_no_module_writes_attributes_of_another_object(module: str) -> None:
    if module not in KNOWN_WRITES:
        assert not foreign_writes(_tree(module))


@pytest.mark.parametrize("module", MODULES)
def test_no_module_reaches_through_another_object(module: str) -> None:
    assert not long_chains(_tree(module))


@pytest.mark.parametrize("module", STEP_PATH)
def test_modules_of_a_step_import_only_those_further_down_the_path(module: str) -> None:
    allowed = set(STEP_PATH[STEP_PATH.index(module) + 1 :])
    assert not imported_modules(_tree(module)) & set(STEP_PATH) - allowed - {module}


def test_a_step_without_a_leaving_node_never_calls_the_hand_off() -> None:
    importers = {module for module in MODULES if "handoff" in imported_modules(_tree(module))}
    assert importers == {"replay", "train_loop"}, "only the replay, and what the loop does after an epoch has ended"


def test_the_checks_find_what_they_look_for() -> None:
    tree = ast.parse("executor.shadows = 1\nself.x = 2\nself.a.b = 3\nself.a.b.c()\nself.a.b.get(1)\ndel other.part\n")
    assert foreign_writes(tree) == ["line 1: executor.shadows", "line 3: self.a.b", "line 6: other.part"]
    assert long_chains(tree) == ["line 4: self.a.b.c"]
