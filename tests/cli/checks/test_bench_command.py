"""`culm bench`: which benches there are, and all of them at once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.table import Table

from culm.cli import main
from culm.cli.checks import bench_command
from culm.errors import RunError


def working_bench(quick: bool) -> tuple[Any, Any]:
    return {"quick": quick}, Table("figures of it")


def failing_bench(quick: bool) -> tuple[Any, Any]:
    raise RunError("there is no graph here")


@pytest.fixture(autouse=True)
def two_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_command, "BENCHES", {"one": working_bench, "other": failing_bench, "all": bench_command._run_all}
    )


def exit_code(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    return ended.value.code


def test_all_runs_every_bench_and_reports_those_that_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("all", "--quick", "--json") == 0
    found = capsys.readouterr()
    assert json.loads(found.out) == {"one": {"quick": True}, "other": {"unavailable": "there is no graph here"}}
    assert found.err.splitlines() == ["bench one", "bench other"]


def test_all_shows_the_tables_one_below_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("all") == 0
    shown = capsys.readouterr().out
    assert shown.index("figures of it") < shown.index("other: there is no graph here")


def test_a_bench_that_there_is_not_is_refused_with_the_nearest_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("othr") == 2
    assert "there is no bench 'othr': did you mean other?" in capsys.readouterr().err


def test_rows_of_the_gpu_bench_reach_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(quick: bool, **options: Any) -> tuple[Any, Any]:
        return {"quick": quick, **options}, Table("figures")

    monkeypatch.setattr(bench_command, "_gpu", run)
    monkeypatch.setitem(bench_command.BENCHES, "gpu", run)
    command = ["gpu", "--json", "--rows", "1f1b-4, zb-4", "--combine", "a.json", "--combine", "b.json"]
    assert exit_code(*command, "--device", "cpu", "--rounds", "3", "--quick") == 0
    assert json.loads(capsys.readouterr().out) == {
        "quick": True,
        "rounds": 3,
        "rows": ["1f1b-4", "zb-4"],
        "combine": ["a.json", "b.json"],
        "device": "cpu",
    }
    assert exit_code("one", "--rows", "plain") == 2
    assert "--rows is for gpu and models, --combine and --device for gpu: not one" in capsys.readouterr().err


def test_rows_of_the_models_bench_that_there_are_not_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench_command.BENCHES, "models", working_bench)
    assert exit_code("models", "--rows", "memory,time") == 2
    assert "--rows has 'time': use some of speed, memory" in capsys.readouterr().err
    assert exit_code("models", "--rows", "memory", "--device", "cpu") == 2
