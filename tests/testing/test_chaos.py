"""`culm chaos`: random runs with random faults are survived and reproducible, and failures are reported."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from culm.cli import main
from culm.cluster.leader.output import input_log
from culm.cluster.node_faults import NoticeToNode
from culm.errors import UsageError
from culm.strategies import known_names
from culm.testing import ReferenceResult, chaos
from culm.testing.chaos import (
    FEATURES,
    STEADY_SHAPES,
    UNEQUAL_LAYERS,
    ChaosResult,
    check_strategies,
    coverage,
    make_job,
    random_scenario,
    run_scenario,
)
from culm.testing.random_reshape_faults import RESHAPE_SHAPES as CHANGING_SHAPES

BATCH = 20


@functools.cache
def result_of_seed(seed: int) -> ChaosResult:
    return run_scenario(random_scenario(seed))


@pytest.mark.parametrize("batch", range(10))
def test_every_seed_is_survived(batch: int) -> None:
    outcomes = [result_of_seed(seed) for seed in range(batch * BATCH, (batch + 1) * BATCH)]
    failures = [f"{outcome.scenario}\n{outcome.failure}" for outcome in outcomes if outcome.failure]
    assert not failures, f"replay with culm chaos --seed K\n{failures[0]}"


def test_a_seed_reproduces_its_run() -> None:
    for seed in range(100, 104):
        one, other = result_of_seed(seed), run_scenario(random_scenario(seed))
        assert one == other
        assert "epoch 1: members" in one.history + one.failure


def test_random_scenarios_cover_all_strategies_schedules_and_faults() -> None:
    drawn = [random_scenario(seed) for seed in range(300)]
    assert {(scenario.pipelines, scenario.stages) for scenario in drawn} == {*STEADY_SHAPES, *CHANGING_SHAPES}
    assert {scenario.schedule for scenario in drawn} == {"gpipe", "1f1b", "zb", "interleaved", "planned"}
    assert {scenario.strategy for scenario in drawn} == set(check_strategies())
    assert {name for scenario in drawn for name in scenario.features} == {*FEATURES, UNEQUAL_LAYERS}
    assert {scenario.exact for scenario in drawn} == {True, False}
    assert len({str(scenario.faults) for scenario in drawn}) > 250
    faults = [fault for scenario in drawn for fault in scenario.faults.all]
    assert {fault.call_name for fault in faults} >= {
        "kill",
        "pause",
        "partition",
        "warn",
        "join",
        "outage",
        "drop_message",
        "request_layout",
    }
    notices = [fault for fault in faults if isinstance(fault, NoticeToNode)]
    assert {fault.seconds == 0 for fault in notices} == {len(fault.nodes) == 1 for fault in notices} == {True, False}


def test_faults_hit_the_leader_often_enough_for_leaders_to_change() -> None:
    counts = coverage([result_of_seed(seed) for seed in range(12)])
    assert {"1", "2"} <= counts["leaders"].keys()


def test_strategies_can_be_restricted_to_known_names() -> None:
    able = ("none", "shadow", "shadow-lazy", "reroute", "templates")
    assert check_strategies() == tuple(name for name in known_names() if name in able)
    assert {random_scenario(seed, ["none"]).strategy for seed in range(20)} == {"none"}
    with pytest.raises(UsageError, match="--strategy 'auto' cannot be tested by chaos: use none"):
        check_strategies(["auto"])


@pytest.mark.parametrize("feature", [*FEATURES, UNEQUAL_LAYERS])
def test_every_feature_makes_a_job_of_its_own(feature: str) -> None:
    plain, with_it = make_job((), True, 4), make_job((feature,), True, 4)
    different = [
        name
        for name in ("clip_norm", "tied", "loss", "precision", "evaluate_every")
        if getattr(plain, name) != getattr(with_it, name)
    ]
    factories = [i for i, (a, b) in enumerate(zip(plain.layers, with_it.layers, strict=True)) if a is not b]
    assert len(different) + len(factories) == (0 if feature == "checkpoints" else 1)


def test_coverage_counts_only_injected_faults() -> None:
    outcomes = [run_scenario(random_scenario(seed, ["none"])) for seed in range(12)]
    counts = coverage(outcomes)
    assert counts["strategy"] == {"none": 12}
    assert sum(counts["shape"].values()) == sum(counts["schedule"].values()) == sum(counts["result"].values()) == 12
    assert sum(counts["fault"].values()) == sum(len(outcome.injected_faults) for outcome in outcomes)
    assert coverage([ChaosResult(random_scenario(0))])["fault"] == {}


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["chaos", *arguments])
    shown = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, shown.out, shown.err


def test_the_command_ends_with_a_table_of_what_was_covered(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--seeds", "3")
    assert code == 0
    assert "3 of 3 seeds survived" in out
    assert all(name in out for name in ("strategy", "shape", "schedule", "fault"))
    assert "failed" not in err


def test_as_json_it_prints_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--seeds", "3", "--json", "--strategy", "none")
    found = json.loads(out)
    assert code == 0
    assert (found["seeds"], found["survived"], found["failed"]) == (3, 3, [])
    assert found["covered"]["strategy"] == {"none": 3}
    assert found["wall_s"] > 0


@pytest.mark.usefixtures("wrong_reference")
def test_seeds_start_at_the_first_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--seeds", "2", "--first", "40", "--json", "--strategy", "none")
    assert code == 1
    assert [failed["seed"] for failed in json.loads(out)["failed"]] == [40, 41]


def test_the_files_of_a_seed_are_kept_and_the_decisions_of_its_leaders_replayed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, _ = run(capsys, "--seed", "21", "--workers-per-node", "2", "--out", str(tmp_path / "run"))
    assert code == 0
    logs = sorted((tmp_path / "run").glob("leader-*.log"))
    assert len(logs) == 2, "the first leader is lost"
    for log in logs:
        count, difference = input_log.replay(log)
        assert count > 20
        assert difference is None
    code, _, err = run(capsys, "--seed", "21", "--out", str(tmp_path / "run"))
    assert (code, "is not an empty folder" in err) == (2, True)


def test_a_seed_is_replayed_with_its_history(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--seed", "7")
    assert code == 0
    assert out.startswith(f"{random_scenario(7)}\nsurvived, with ")
    assert "epoch 1: members" in out


@pytest.fixture
def wrong_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong reference result: every run counts as a failure."""
    right = chaos._expected_result

    def wrong_result(*key: Any) -> ReferenceResult:
        found = right(*key)
        parameters = {name: value + 1 for name, value in found.snapshot.parameters.items()}
        snapshot = type(found.snapshot)(parameters, found.snapshot.buffers, found.snapshot.moments)
        return ReferenceResult(found.losses, found.evaluations, snapshot, "", "")

    monkeypatch.setattr(chaos, "_expected_result", wrong_result)


@pytest.mark.usefixtures("wrong_reference")
def test_a_run_with_a_different_result_is_a_failure_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--seeds", "2", "--strategy", "none", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["survived"] == 0
    assert [failed["seed"] for failed in found["failed"]] == [0, 1]
    assert "epoch 1: members" in found["failed"][0]["failure"]
    assert "culm: 2 of 2 seeds failed (0, 1): replay with culm chaos --seed 0 --strategy none" in err


@pytest.mark.usefixtures("wrong_reference")
def test_a_failure_is_replayed_with_its_differences_and_history(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--seed", "1")
    assert code == 1
    assert "the state is not the same to the last bit" in out or "is off by" in out
    assert "was last at" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seeds", "0"], "culm: --seeds is 0: use a whole number of at least 1"),
        (["--seed", "-1"], "culm: --seed is -1: use a whole number of at least 0"),
        (["--seed", "1", "--seeds", "2"], "culm: --seed 1 replays one and --seeds 2 tries many: give one of them"),
        (["--seed", "1", "--first", "2"], "culm: --seed 1 replays one and --first 2 tries many: give one of them"),
        (["--out", "run"], "culm: --out keeps the files of one run: name its seed with --seed"),
        (["--first", "-2"], "culm: --first is -2: use a whole number of at least 0"),
        (["--changing", "--strategy", "none"], "culm: --changing needs a strategy that goes on after a loss: add one"),
        (["--strategy", "hope"], "culm: --strategy 'hope' cannot be tested by chaos: use "),
    ],
)
def test_a_wrong_request_is_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(sentence)
    assert err.count("\n") == 1
