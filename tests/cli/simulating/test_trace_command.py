"""`culm trace` as users type it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from culm.cli import main


def culm(*arguments: str) -> int:
    """The exit code of the command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.csv"
    path.write_text("0,add,a\n0,add,b\n1800000,remove,a\n3600000,add,c\n")
    return str(path)


def test_show_draws_and_describes(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert culm("trace", "show", trace, "--svg", str(tmp_path / "t.svg")) == 0
    out = capsys.readouterr().out
    assert "3 added, 1 lost" in out
    assert "█" in out
    assert (tmp_path / "t.svg").read_text().startswith("<svg")


def test_show_as_json_has_the_statistics(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert culm("trace", "show", trace, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["adds"], result["removes"], result["alive"]) == (3, 1, 1.5)


def test_convert_and_generate_write_traces(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert culm("trace", "convert", trace, "--to", "counts") == 0
    assert capsys.readouterr().out == "0,2\n1800000,1\n3600000,2\n3600000,2\n"
    out = str(tmp_path / "made.csv")
    assert culm("trace", "generate", "--market", "nodes=4,hours=1", "--seed", "3", "--out", out) == 0
    assert culm("trace", "show", out) == 0


def test_fit_prints_a_market_that_can_be_used_again(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert culm("trace", "fit", trace) == 0
    option = capsys.readouterr().out.splitlines()[-1].removeprefix("--market ")
    assert culm("trace", "generate", "--market", option) == 0
    capsys.readouterr()
    assert culm("trace", "fit", trace, "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) == {"market", "given", "generated", "option"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "nowhere.csv"),
        ("convert", "{trace}", "--to", "poem"),
        ("convert", "{trace}", "--to", "skypilot", "--gap", "0"),
        ("show", "{trace}", "--unit", "weeks"),
        ("generate", "--market", "rate=quick"),
        ("show", "{trace}", "--svg", "/nowhere/t.svg"),
    ],
)
def test_an_invalid_request_gives_a_one_sentence_error(
    trace: str, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert culm("trace", *(argument.format(trace=trace) for argument in arguments)) == 2
    err = capsys.readouterr().err
    assert err.startswith("culm: ")
    assert err.count("\n") == 1
