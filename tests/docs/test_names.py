"""Names are unique, folders stay readable, and the documentation names only what exists."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docs.markdown import ROOT, anchors, code_blocks, documents, inline_code, links

from culm.cli import root_click_command
from culm.testing import Faults

SOURCES = ("src/culm", "benchmarks")
FOLDERS = ("src", "benchmarks", "tests", "examples")
FOREIGN_PROGRAMS = ("aws ", "docker ")
"""Beginnings of lines with options of other programs only."""
FOREIGN_OPTIONS = {
    "--cores": "python -m benchmarks.gnn",
    "--graphs": "python -m benchmarks.gnn",
    "--parts": "python -m benchmarks.resilience, python -m benchmarks.gnn",
    "--seconds": "python -m benchmarks.gnn",
    "--schedules": "python -m benchmarks",
    "--constraint": "pip",
    "--context": "kubectl",
    "--namespace": "kubectl",
    "--editable": "pip",
    "--extra-index-url": "pip",
    "--wheel": "python -m build",
}
"""Options in the documentation that belong to other programs, with the program."""

_COMMAND = re.compile(r"(?:^|[\s`(])culm ((?:[a-z]+ )*[a-z]+)\b")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_DOTTED = re.compile(r"\b(?:culm|benchmarks)(?:\.\w+)+")
_FILE = re.compile(r"(?<![\w./:-])((?:[\w-]+/)+[\w-]+\.py)\b")


def _modules() -> list[Path]:
    return [path for root in SOURCES for path in sorted((ROOT / root).rglob("*.py"))]


def _repeated(names: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: places for name, places in names.items() if len(places) > 1}


def test_module_names_are_unique() -> None:
    names = defaultdict(list)
    for path in _modules():
        if not path.stem.startswith("__"):
            names[path.stem].append(str(path.relative_to(ROOT)))
    assert not _repeated(names)


def test_public_class_names_are_unique() -> None:
    names = defaultdict(list)
    for path in _modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name].append(str(path.relative_to(ROOT)))
    assert not _repeated(names)


def test_a_type_alias_has_one_meaning() -> None:
    """It has the name of no class, and modules that define the same alias define it alike."""
    classes, aliases = set(), defaultdict(set)
    for path in _modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
                assert node.value is not None
                aliases[ast.unparse(node.target)].add(ast.unparse(node.value).strip("'"))
    public = {name: values for name, values in aliases.items() if not name.startswith("_")}
    assert classes & set(public) == set()
    assert {name: values for name, values in public.items() if len(values) > 1} == {}


def test_no_folder_holds_thirty_modules() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py"]
    modules = [path for path in _modules() if not path.stem.startswith("__")]
    folders = Counter(str(path.parent.relative_to(ROOT)) for path in modules + tests)
    assert {folder: count for folder, count in folders.items() if count >= 30} == {}


def _page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _code(text: str) -> list[str]:
    """Inline code, and the lines of fenced blocks with continued lines joined."""
    lines = [line for block in code_blocks(text) for line in block.body.replace("\\\n", " ").splitlines()]
    return inline_code(text) + lines


def _options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def _all_options(command: Any) -> Iterator[str]:
    yield from _options(command)
    for sub_command in getattr(command, "commands", {}).values():
        yield from _all_options(sub_command)


def _find_command(words: list[str]) -> Any:
    """The command that the first words name. Raises KeyError where a group has no such command."""
    command = root_click_command()
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    return command


@pytest.mark.parametrize("page", documents(), ids=_page_id)
def test_commands_in_the_documentation_exist(page: Path) -> None:
    wrong = []
    for code in _code(page.read_text()):
        for match in _COMMAND.finditer(code.split(" #")[0]):
            try:
                _find_command(match[1].split())
            except KeyError:
                wrong.append(code)
    assert wrong == []


@pytest.mark.parametrize("page", documents(), ids=_page_id)
def test_options_in_the_documentation_exist(page: Path) -> None:
    known = {"-h", "--help", *_all_options(root_click_command()), *FOREIGN_OPTIONS}
    wrong = []
    for code in (code.split(" #")[0].removeprefix("$ ") for code in _code(page.read_text())):
        if code.startswith(FOREIGN_PROGRAMS):
            continue
        command = _COMMAND.match(code)
        accepted = _options(_find_command(command[1].split())) | {"--help"} if command else known
        wrong += [f"{option} in {code!r}" for option in _OPTION.findall(code) if option not in accepted]
    assert wrong == []


def _exists(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one: `culm.testing.survives`."""
    words = dotted.split(".")
    for count in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            annotated = getattr(found, "__annotations__", {})
            if not hasattr(found, word) and word not in annotated:
                return False
            found = getattr(found, word, None)
        return True
    return False


def _imported(source: str) -> Iterator[str]:
    """The names of culm and the benchmarks that a Python snippet imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in ("culm", "benchmarks"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("page", documents(), ids=_page_id)
def test_modules_and_symbols_in_the_documentation_exist(page: Path) -> None:
    text = page.read_text()
    names = {name for code in _code(text) for name in _DOTTED.findall(code)}
    names |= {name for block in code_blocks(text) if block.language == "python" for name in _imported(block.body)}
    assert [name for name in sorted(names) if not _exists(name)] == []


@pytest.mark.parametrize("page", documents(), ids=_page_id)
def test_files_in_the_documentation_exist(page: Path) -> None:
    """A path starts at the root of the repository, at src/culm, or at a folder below: `frames/sockets.py`."""
    files = [f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    paths = {path for code in _code(page.read_text()) for path in _FILE.findall(code)}
    assert [path for path in sorted(paths) if not any(file.endswith(f"/{path}") for file in files)] == []


def test_what_typical_changes_touch_exists() -> None:
    """Each row of the table in CONTRIBUTING: folders exist, and some module of culm has the names."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where a change goes")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))))
    code = [word for row in rows for word in inline_code(row)]
    folders = [word for word in code if re.fullmatch(r"(\w+/)+", word) or re.fullmatch(r"tests(/\w+)+", word)]
    names = [word for word in code if re.fullmatch(r"\w+(\.[a-z_]+)*", word) and not word.startswith("tests")]
    assert len(folders) > 5
    assert [name for name in folders if not any((ROOT / base / name).is_dir() for base in ("src/culm", "."))] == []
    assert len(names) > 12
    assert [name for name in names if not words.issuperset(name.split("."))] == []


def test_faults_in_the_documentation_exist() -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    faults = [match[1] for code in inline_code(text) if (match := re.match(r"\.(\w+)\(", code))]
    assert len(faults) >= 12
    assert [name for name in faults if not hasattr(Faults, name)] == []


@pytest.mark.parametrize("page", [*documents(), ROOT / "CHANGELOG.md"], ids=_page_id)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in links(page.read_text()):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" not in target and not (file.exists() and (not anchor or anchor in anchors(file.read_text()))):
            wrong.append(target)
    assert wrong == []
