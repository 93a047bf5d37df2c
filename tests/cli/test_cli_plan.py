"""`culm plan`: a table and a grid for people, one object for scripts, one sentence for mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from culm.cli import main
from culm.schedule import Action, Plan, check

from .command import one_sentence

SHAPE = ("--pipelines", "3", "--stages", "4", "--micro-batches", "18")


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *SHAPE, *options])
    assert end.value.code == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    found = json.loads(printed(capsys, "--json", *options))
    assert isinstance(found, dict)
    return found


def test_the_table_and_the_grid_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--fail", "2.2")
    rows = {line[:18].strip(): line[18:].strip() for line in found.splitlines()}
    assert rows["slots"] == "27 a step when steps follow each other, 29 for one alone"
    assert rows["bound"] == "27"
    assert rows["gap"] == "0.0%"
    assert rows["no failure"] == "19 planned the same way, 27 with 1F1B"
    assert rows["slowdown"].startswith("1.42x")
    assert rows["peak activations"] == "9"
    assert "reroute: 3 pipelines x 4 stages, 18 micro-batches" in found
    assert "why 1" not in rows


def test_explain_adds_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--fail", "2.2", "--explain")
    assert "stage 2 runs on 2 of 3 workers" in found
    assert "no plan is shorter" in found


@pytest.mark.parametrize(
    ("options", "slots", "bound"),
    [
        (["--no-split", "--no-stagger"], 27, 27),
        (["--fail", "2.2", "--no-split", "--no-stagger"], 33, 33),
        (["--fail", "2.2", "--no-stagger"], 29, 29),
        (["--fail", "2.2"], 27, 27),
        (["--fail", "2.2", "--memory", "1f1b"], 32, 31),
        (["--fail", "2.2", "--memory", "4"], 29, 28),
        (["--fail", "1.2", "--fail", "2.2"], 54, 54),
        (["--fail", "2.2", "--times", "F=2,I=2,W=2"], 54, 54),
    ],
)
def test_options_change_the_answer(
    capsys: pytest.CaptureFixture[str], options: list[str], slots: int, bound: int
) -> None:
    found = as_json(capsys, *options)
    assert (found["slots"], found["bound"]) == (slots, bound)
    assert found["gap"] == pytest.approx(slots / bound - 1)
    assert found["solver"] == "greedy"


def test_the_schedule_in_the_json_is_one_that_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--fail", "2.2", "--fail", "0.1", "--memory", "4")
    rows = {label: tuple(map(Action.parse, row)) for label, row in found["schedule"].items()}
    assert list(rows)[:5] == ["0.0", "0.1", "0.2", "0.3", "1.0"]
    assert rows["2.2"] == rows["0.1"] == ()
    assert found["failed"] == ["0.1", "2.2"]
    plan = Plan("read", 3, 4, 4, 18, tuple(rows.values()), failed=(1, 10))
    assert check(plan, memory=4).peak == found["peak_activations"] == 4


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--fail", "5.0"], "the failed slot 5.0 does not exist: use 0.0 to 2.3"),
        (["--fail", "2,2"], "--fail '2,2' is no slot: write pipeline.stage"),
        (["--fail", "0.1", "--fail", "1.1", "--fail", "2.1"], "stage 1 has lost all of its 3 workers"),
        (["--times", "F=-1"], "Costs.forward is -1.0: use a number of at least 0"),
        (["--times", "Q=1"], "--times has 'Q=1'"),
        (["--memory", "lots"], "--memory 'lots' is no number of activations: use none, 1f1b, or a number"),
        (["--memory", "0"], "memory is 0"),
        (["--solver", "magic"], "there is no --solver 'magic': use greedy or cp-sat"),
        (["--solver", "cp-sat", "--limit", "0"], "the time limit is 0.0 s: use a number above 0"),
        (["--micro-batches", "2"], "micro_batches is 2, fewer than the 3 pipelines"),
        (["--stages", "0"], "stages is 0: use a whole number of at least 1"),
    ],
)
def test_a_wrong_request_ends_with_one_sentence(
    capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", *SHAPE, *options])
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert shown.out == ""
    assert sentence in one_sentence(shown.err)


def test_it_needs_neither_torch_nor_numpy() -> None:
    script = (
        "import sys; from culm.cli import main\n"
        "try: main()\n"
        "except SystemExit: sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, "plan", *SHAPE, "--fail", "2.2"], capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == 0
    assert b"27 a step" in ended.stdout
