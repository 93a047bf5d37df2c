"""What is seen of a run while it is under way, and at its end."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from culm.cli.progress_display import (
    BarDisplay,
    LogDisplay,
    ProgressDisplay,
    ThroughputMeter,
    format_whole_seconds,
    make_display,
)
from culm.cli.run_tables import schedule_grid, stage_words, summary_table
from culm.cluster.run_setup import RunSetup
from culm.observe.step_metrics import StepMetrics
from culm.schedule import generate_plan


def setup(schedule: str = "1f1b", segments: tuple[tuple[int, int], ...] = ((0, 3), (3, 6)), **changes: Any) -> RunSetup:
    plan = generate_plan(schedule, pipelines=2, stages=2, micro_batches=8)
    fields: dict[str, Any] = {
        "nodes": 4,
        "pipelines": 2,
        "stages": 2,
        "schedule": schedule,
        "strategy": "none",
        "segments": segments,
        "plan": plan.to_text(),
        "evaluation": None,
        "evaluation_parts": 0,
        "weighted": False,
        "steps": 100,
        "reason": "as asked",
    }
    return RunSetup(**{**fields, **changes})


def metrics(step: int, t: float, loss: float | None = 2.5) -> StepMetrics:
    return StepMetrics(step, t, loss, 8)


def log() -> Console:
    return Console(file=io.StringIO(), width=120)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = ThroughputMeter(steps=100)
    for step in range(10):
        pace.add_step(metrics(step, 100.0 * step))
    for step in range(10, 60):
        pace.add_step(metrics(step, 900.0 + (step - 9) * 0.5))
    assert pace.samples_per_s == pytest.approx(16)
    assert pace.remaining_s == pytest.approx(20)


def test_one_step_is_no_pace_yet() -> None:
    pace = ThroughputMeter(steps=100)
    pace.add_step(metrics(0, 1.0))
    assert pace.samples_per_s is None
    assert pace.remaining_s is None


def test_a_log_gets_a_line_now_and_then_and_always_the_last() -> None:
    console = log()
    shown = LogDisplay(console)
    shown.show_setup(setup())
    before = len(written(console).splitlines())
    for step in range(100):
        shown.show_step(metrics(step, 0.1 * step))
    lines = written(console).splitlines()[before:]
    assert [line.split()[1] for line in lines] == ["1/100", "21/100", "41/100", "61/100", "81/100", "100/100"]
    assert lines[1] == "steps 21/100  loss 2.5000  80 samples/s  8 s left"


def test_a_log_names_what_begins_and_what_is_complete_but_no_step_between() -> None:
    console = log()
    shown = LogDisplay(console)
    shown.show_progress("importing", 0, 0)
    for done in range(4):
        shown.show_progress("measuring layers", done, 3)
    assert written(console).splitlines() == ["importing", "measuring layers 0/3", "measuring layers 3/3"]


def test_a_log_of_long_work_gets_a_line_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    console = log()
    shown = LogDisplay(console)
    for done in range(6):
        monkeypatch.setattr("culm.cli.progress_display.time", SimpleNamespace(monotonic=lambda now=done: now))
        shown.show_progress("retraining", done, 6)
    assert written(console).splitlines() == ["retraining 0/6", "retraining 2/6", "retraining 4/6"]


def test_a_loss_that_is_not_a_number_is_reported() -> None:
    console = log()
    shown = LogDisplay(console)
    shown.show_setup(setup())
    shown.show_step(metrics(0, 0.0, loss=None))
    assert written(console).splitlines()[-1] == "steps 1/100  loss not finite"


def test_quiet_shows_nothing_and_a_terminal_gets_a_bar() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert type(make_display(terminal, quiet=True)) is ProgressDisplay
    assert type(make_display(terminal, quiet=False)) is BarDisplay
    assert type(make_display(log(), quiet=False)) is LogDisplay


def test_a_bar_lets_what_user_code_prints_pass_unchanged() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    shown = BarDisplay(console)
    shown.show_progress("importing", 0, 0)
    shown.show_setup(setup())
    shown.show_step(metrics(0, 0.0))
    shown.print_line("lr [bold]0.1[/bold]")
    shown.show_step(metrics(1, 0.5))
    shown.close()
    assert "lr [bold]0.1[/bold]" in written(console)
    assert "steps 2/100" in written(console)


def test_the_start_of_a_run_shows_shape_schedule_layers_and_why() -> None:
    console = log()
    LogDisplay(console).show_setup(setup(out="runs/a"))
    shown = written(console)
    assert "2 x 2 (pipelines x stages): 4 nodes" in shown
    assert "1f1b, 8 micro-batches a step" in shown
    assert "0-2 | 3-5" in shown
    assert "as asked" in shown
    assert "0F0" in shown


def test_interleaved_stages_name_all_their_layers() -> None:
    cut = ((0, 1), (1, 3), (3, 4), (4, 6))
    assert stage_words(setup("interleaved", cut)) == "0, 3 | 1-2, 4-5"


def test_a_schedule_too_wide_to_be_read_is_left_out() -> None:
    assert schedule_grid(setup(), 100)
    assert schedule_grid(setup(), 20) == ""


def summary(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "steps": 4,
        "samples": 32,
        "samples_expected": 32,
        "samples_lost": 0,
        "samples_duplicated": 0,
        "wall_s": 1.5,
        "start_s": 0.5,
        "goodput": 21.3,
        "final_loss": 2.25,
        "weights_sha256": "0123456789abcdef" * 4,
        "checkpoints": [2, 4],
        "skipped_steps": 0,
        "evaluations": {},
        "preemptions": 0,
        "recoveries": [],
    }
    return {**fields, **changes}


def ledger(**changes: Any) -> str:
    console = log()
    console.print(summary_table(summary(**changes), "runs/a"))
    return written(console)


def test_the_ledger_says_that_every_sample_was_counted_once() -> None:
    shown = ledger()
    assert "32, each counted once (expected 32, lost 0, duplicated 0)" in shown
    assert "2 written, the newest of step 4" in shown
    assert "0123456789ab" in shown
    assert "runs/a" in shown


@pytest.mark.parametrize("wrong", [{"samples": 30, "samples_lost": 2}, {"samples_duplicated": 1}])
def test_the_ledger_says_so_when_a_sample_was_not(wrong: dict[str, int]) -> None:
    assert "NOT each counted once" in ledger(**wrong)


def test_the_ledger_names_skipped_steps_and_the_last_evaluation() -> None:
    shown = ledger(skipped_steps=3, evaluations={1: 2.0, 3: 1.75})
    assert "skipped steps" in shown
    assert "loss 1.75 after step 4" in shown


def test_the_ledger_names_the_preemptions_that_were_survived() -> None:
    assert "preemptions   none" in ledger()
    recoveries = [{"lost": [3], "step": 5, "source": "peers"}, {"lost": [1, 2], "step": 7, "source": "shadow"}]
    shown = ledger(preemptions=3, recoveries=recoveries)
    assert "3 survived: node 3 in step 5 by peers, nodes 1 and 2 in step 7 by shadow" in shown


def test_durations_are_written_for_people() -> None:
    assert [format_whole_seconds(s) for s in (0.4, 59, 200, 3900)] == ["0 s", "59 s", "3:20 min", "1:05:00 h"]
