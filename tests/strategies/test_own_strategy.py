"""A strategy that is defined outside of culm: the example passes the fault kit and a real run with a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.cli_process import JOBS, culm
from tests.testing.test_kill_at_every_action import STEP, moments, prepared_setup, run_and_check, sweep_job

from culm.job import load_job
from culm.schedule import Plan
from culm.strategies import get
from culm.testing import Faults, chaos, reference, survives

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_strategy.py"
OWN = "own_strategy:ThreeHolders"


@pytest.fixture(autouse=True)
def example_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))


@pytest.mark.parametrize("node", range(6))
def test_a_node_killed_at_any_of_its_actions_changes_nothing_that_is_learned(node: int) -> None:
    setup = prepared_setup(2, 3, "1f1b", OWN, True)
    for at in moments(setup, node):
        run = run_and_check(Faults().kill(node, at=at, step=STEP), setup, True)
        assert {recovery["source"] for recovery in run.summary["recoveries"]} == {"peers"}


@pytest.mark.parametrize("stage", range(3))
def test_both_peers_of_a_stage_may_be_lost_at_once(stage: int) -> None:
    """Under reroute that would need a checkpoint."""
    setup = prepared_setup(2, 3, "zb", OWN, True)
    plan = Plan.from_text(setup.plan)
    assert not get("reroute").survives(plan, {stage, stage + 3})
    assert get(OWN).survives(plan, {stage, stage + 3})
    for at in list(moments(setup, stage))[stage::3]:
        run = run_and_check(Faults().kill((stage, stage + 3), at=at, step=STEP), setup, True)
        assert {recovery["source"] for recovery in run.summary["recoveries"]} == {"shadow"}


def test_it_survives_random_faults() -> None:
    assert len(survives(sweep_job(), seeds=range(4), pipelines=2, stages=3, strategy=OWN)) == 4
    for seed in range(8):
        outcome = chaos.run_scenario(chaos.random_scenario(seed, [OWN]))
        assert outcome.scenario.strategy == OWN
        assert not outcome.failure, outcome.failure


@pytest.mark.real
def test_a_real_run_finds_it_in_the_current_folder_and_survives_a_kill(tmp_path: Path) -> None:
    shutil.copy(EXAMPLE, tmp_path / "kept_thrice.py")
    shape = ("--pipelines", "2", "--stages", "2", "--exact", "--json")
    ended = culm(
        "run", JOBS, *shape, "--strategy", "kept_thrice:ThreeHolders", "--kill", "node=3 step=2 at=1B3", cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["strategy"] == "kept_thrice:ThreeHolders"
    assert summary["state_sha256"] == reference(load_job(JOBS, {"exact": "true"})).state_sha256
    assert [recovery["source"] for recovery in summary["recoveries"]] == ["peers"]
