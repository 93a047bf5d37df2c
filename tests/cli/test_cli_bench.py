"""`culm bench`: which benches there are, and all of them at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.table import Table

from culm.cli import bench, main
from culm.errors import RunError


def measured(quick: bool) -> tuple[Any, Any]:
    return {"quick": quick}, Table("figures of it")


def refusing(quick: bool) -> tuple[Any, Any]:
    raise RunError("there is no graph here")


@pytest.fixture(autouse=True)
def two_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BENCHES", {"one": measured, "other": refusing, "all": bench._all})


def code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    return ended.value.code


def test_all_is_every_bench_by_name_and_says_what_can_not_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("all", "--quick", "--json") == 0
    found = capsys.readouterr()
    assert json.loads(found.out) == {"one": {"quick": True}, "other": {"unavailable": "there is no graph here"}}
    assert found.err.splitlines() == ["bench one", "bench other"]


def test_all_shows_the_tables_one_below_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("all") == 0
    shown = capsys.readouterr().out
    assert shown.index("figures of it") < shown.index("other: there is no graph here")


def test_a_bench_that_there_is_not_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert code("othr") == 2
    assert "there is no bench 'othr': did you mean other?" in capsys.readouterr().err
