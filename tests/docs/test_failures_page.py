"""The page of failures names tests that exist, and says which of them use real processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.markdown import ROOT, inline_code

PAGE = (ROOT / "docs" / "failures.md").read_text()
_TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


def _files_by_test() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for name in _TEST.findall(path.read_text()):
            found.setdefault(name, []).append(path)
    return found


def named_tests() -> list[str]:
    return [code for code in inline_code(PAGE) if re.fullmatch(r"test_\w+", code)]


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ") and "| what goes wrong" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_every_named_test_exists() -> None:
    known = _files_by_test()
    assert len(named_tests()) > 50
    assert [name for name in named_tests() if name not in known] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_every_row_is_complete_and_names_a_test(row: list[str]) -> None:
    assert len(row) == 5
    assert all(row)
    assert "`test_" in row[4]


def test_tests_that_are_called_real_are_marked_so() -> None:
    known = _files_by_test()
    called = re.findall(r"\*real\* `(test_\w+)`", PAGE)
    assert called
    assert [name for name in called if not any("mark.real" in path.read_text() for path in known[name])] == []
