"""`culm run --kill`: nodes struck down by SIGKILL at an action, and a run that goes on as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.cli_process import JOBS
from typer.testing import CliRunner

from culm.cli import app
from culm.job import load_job
from culm.testing import reference

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("shared_fork_server")]


def invoke(*arguments: str) -> tuple[int, str]:
    """The exit code of a run, and all that it said."""
    found = CliRunner().invoke(app, ["run", JOBS, "--exact", *arguments])
    return found.exit_code, found.output


def run_summary(*arguments: str) -> dict[str, Any]:
    """The summary of a run that must go well."""
    found = CliRunner().invoke(app, ["run", JOBS, "--exact", "--json", *arguments])
    assert found.exit_code == 0, found.output
    summary: dict[str, Any] = json.loads(found.stdout)
    return summary


def expected_state(steps: int) -> str:
    """The state after this many steps of a run that nothing befalls."""
    return reference(load_job(JOBS, {"exact": "true", "steps": str(steps)})).state_sha256


def test_a_node_killed_at_an_action_changes_nothing_that_is_learned() -> None:
    hurt = run_summary("--pipelines", "2", "--stages", "1", "--strategy", "reroute", "--kill", "node=1 step=2 at=0B3")
    assert hurt["state_sha256"] == expected_state(4)
    assert (hurt["preemptions"], hurt["samples_lost"], hurt["samples_duplicated"]) == (1, 0, 0)
    (recovered,) = hurt["recoveries"]
    assert (recovered["step"], recovered["lost"], recovered["source"]) == (2, [1], "peers")
    assert recovered["detect_ms"] > 0


def test_events_of_a_run_are_shown_and_are_in_its_ledger_and_folder(tmp_path: Path) -> None:
    """Nor does it befall the run again that is resumed there: a step that is behind it is refused."""
    code, shown = invoke(
        "--stages", "2", "--strategy", "shadow", "--kill", "node=1 step=1 at=1F2", "--out", str(tmp_path / "a")
    )
    assert code == 0
    assert "node 1 is gone\n" in shown
    assert "step 1 went on without node 1, by shadow: " in shown
    assert "1 survived: node 1 in step 1 by shadow" in shown
    events = [json.loads(line) for line in (tmp_path / "a" / "events.jsonl").read_text().splitlines()]
    assert [event["node"] for event in events if event["kind"] == "lost"] == [1]
    assert [event["lost"] for event in events if event["kind"] == "recovered"] == [[1]]
    again = ("--stages", "2", "--steps", "6", "--resume", str(tmp_path / "a"), "--kill", "node=1 step=1 at=1F1")
    code, shown = invoke(*again)
    assert code == 2
    assert "there is no step 1: the first one is 4" in " ".join(shown.split())


def test_kills_may_be_several_and_strike_one_after_the_other() -> None:
    """The second names no action: one of the step is drawn from the seed."""
    shape = ("--pipelines", "2", "--stages", "2", "--steps", "6")
    hurt = run_summary(*shape, "--kill", "node=3 step=1 at=1B3", "--kill", "node=0 step=4")
    assert hurt["state_sha256"] == expected_state(6)
    assert [lost for recovered in hurt["recoveries"] for lost in recovered["lost"]] == [3, 0]


def test_under_split_backward_B_means_the_W() -> None:
    assert run_summary("--stages", "2", "--schedule", "zb", "--kill", "node=0 step=2 at=0B1")["preemptions"] == 1


def test_without_a_strategy_a_kill_ends_the_run() -> None:
    code, shown = invoke("--stages", "2", "--strategy", "none", "--kill", "node=1 step=1 at=1F2")
    assert code == 1
    assert "culm: node 1" in shown
    assert "was lost" in shown


def test_a_kill_whose_moment_did_not_come_is_reported() -> None:
    """After the first loss node 1 has work of both stages, but never the forward that it was to die at again."""
    code, shown = invoke("--stages", "2", "--kill", "node=1 step=3 at=1F2 nth=2")
    assert code == 0
    assert "--kill 'node=1 step=3 at=1F2 nth=2' killed no node: its action was not run by that node" in shown


@pytest.mark.parametrize(
    ("kill", "why"),
    [
        ("node=1 step=2 at=0F1", "node 1 never runs 0F1: name one of its actions, 1F0 "),
        ("node=1 step=2 at=1F9", "node 1 never runs 1F9"),
        ("node=7 step=2 at=1F1", "there is no node 7: the last one is 1"),
        ("node=1 step=9 at=1F1", "there is no step 9: the last one is 3"),
        ("node=1 step=two", "has step=two: use a whole number"),
        ("node=1", "does not say when"),
        ("step=1", "names no node"),
        ("node=1 step=2 at=soon", "at is 'soon'"),
        ("one at noon", "write it as in"),
    ],
)
def test_a_kill_that_could_never_strike_is_refused_in_one_sentence(kill: str, why: str) -> None:
    code, shown = invoke("--stages", "2", "--kill", kill)
    assert code == 2
    assert why in " ".join(shown.split())
    assert "Traceback" not in shown
