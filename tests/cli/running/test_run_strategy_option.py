"""`culm run --strategy`: what is shown of a baseline, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.cli_process import JOBS
from typer.testing import CliRunner

from culm.cli import app

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("shared_fork_server")]


def invoke(*arguments: str) -> tuple[int, str]:
    """The exit code of a run, and all that it said, without the breaks of lines."""
    found = CliRunner().invoke(app, ["run", JOBS, *arguments])
    return found.exit_code, " ".join(found.output.split())


def test_a_rewind_is_shown_with_what_it_cost(tmp_path: Path) -> None:
    code, shown = invoke(
        "--pipelines", "2", "--stages", "2", "--strategy", "checkpoint", "--checkpoint-every", "1", "--replace-within",
        "0", "--steps", "4", "--out", str(tmp_path / "a"), "--kill", "node=3 step=2 at=1B3",
    )  # fmt: skip
    assert code == 0
    assert "went on without node 3, by checkpoint: " in shown
    assert "each counted once" in shown


def test_drop_says_that_training_changes_before_and_after(tmp_path: Path) -> None:
    code, shown = invoke(
        "--pipelines", "2", "--stages", "2", "--strategy", "drop", "--steps", "4", "--kill", "node=3 step=1 at=1B3"
    )  # fmt: skip
    assert code == 0
    assert "which changes training" in shown
    assert "by drop (its samples are left out: training changes)" in shown
    assert "NOT each counted once" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--stages", "2", "--strategy", "drop"), "--strategy drop needs a pipeline that goes on"),
        (("--stages", "2", "--strategy", "checkpoint"), "--strategy checkpoint needs a folder for its checkpoints"),
        (("--strategy", "migrait"), "did you mean migrate?"),
        (("--restart", "lukewarm"), "did you mean warm?"),
    ],
)
def test_a_strategy_that_cannot_work_is_refused_with_exit_code_2(arguments: tuple[str, ...], sentence: str) -> None:
    code, shown = invoke(*arguments)
    assert code == 2
    assert sentence in shown
    assert "Traceback" not in shown
