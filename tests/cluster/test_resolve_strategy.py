"""`auto` chooses a strategy by cost and gives the reason; impossible requests are refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_jobs import job, linear

from culm.cluster import prepare_run as prepare_run_module
from culm.cluster.prepare_run import prepare_run
from culm.config import RunConfig
from culm.errors import PlanError, UsageError
from culm.plan import PlanCase
from culm.plan.rent.strategy_goodput import GoodputInputs, PreemptionRisk, best_checkpoint_interval_s
from culm.strategies import RunShape, get
from culm.testing import Faults, reference, simulate

JOB = job(layers=[linear] * 6, steps=6, exact=True)


def resolved(**request: Any) -> tuple[str, str]:
    """The strategy of a run, and why."""
    setup = prepare_run(JOB, RunConfig(**request))
    return setup.strategy, setup.reason


@pytest.mark.parametrize(
    ("shape", "strategy", "why"),
    [
        ({"pipelines": 2, "stages": 3}, "reroute", "peers hold every layer"),
        ({"pipelines": 4}, "reroute", "peers hold every layer"),
        ({"stages": 3}, "shadow", "with one pipeline no other node would hold a lost node's layers"),
        ({}, "none", "with one node no other node could go on"),
    ],
    ids=["2x3", "4x1", "1x3", "1x1"],
)
def test_auto_takes_peers_first_and_shadows_where_a_layer_would_have_one_holder(
    shape: dict[str, int], strategy: str, why: str
) -> None:
    chosen, reason = resolved(**shape)
    assert chosen == strategy
    assert why in reason


def test_the_reason_lists_the_estimates_of_all_candidates(tmp_path: Path) -> None:
    _, why = resolved(pipelines=2, stages=3, out=str(tmp_path), preemption_rate=0.2)
    for part in ("of a failure-free run, at 20% preemptions per hour", "(shadow ", "checkpoint "):
        assert part in why


def test_the_reason_names_the_missing_checkpoint_folder() -> None:
    assert "without --out there is no checkpoint" in resolved(pipelines=2, stages=3)[1]


@pytest.mark.parametrize("shape", [{"pipelines": 2, "stages": 3}, {"pipelines": 1, "stages": 3}, {"pipelines": 4}])
def test_the_strategy_chosen_by_auto_survives_a_loss(tmp_path: Path, shape: dict[str, Any]) -> None:
    faults = Faults().kill(1, step=3, nth=2)
    run = simulate(JOB, faults=faults, latency=0.001, cost=lambda *_: 0.01, out=str(tmp_path), **shape)
    assert run.state_sha256 == reference(JOB).state_sha256
    (started,) = [e for e in map(json.loads, (tmp_path / "events.jsonl").open()) if e["kind"] == "run_started"]
    assert f"strategy {run.summary['strategy']}: " in started["why"]


CASES = st.builds(
    PlanCase,
    pipelines=st.integers(1, 4),
    stages=st.integers(1, 5),
    micro_batches=st.integers(4, 12),
    stagger=st.booleans(),
)
RISKS = st.builds(
    PreemptionRisk,
    preemption_rate=st.floats(0, 2),
    mean_group_size=st.floats(1, 6),
    checkpoint_stall_s=st.floats(0.1, 5),
)


@given(CASES, st.floats(0.01, 100), RISKS, st.booleans())
def test_a_choice_can_be_used_in_its_shape_and_is_near_the_best(
    case: PlanCase, step_s: float, risk: PreemptionRisk, saves: bool
) -> None:
    nodes = case.pipelines * case.stages
    run = GoodputInputs(case=case, failure_free_step_s=step_s, nodes=nodes, state_bytes=1e9, risk=risk)
    shape = RunShape(case.pipelines, case.stages, has_folder=saves)
    chosen = get("auto").choose(run, shape)
    assert (chosen.strategy.name == "none") == (nodes == 1)
    chosen.strategy.check(shape)
    assert chosen.why.startswith(f"strategy {chosen.strategy.name}: ")
    assert (chosen.checkpoint_interval_s is not None) == (saves and nodes > 1)


@given(st.floats(0.01, 2), st.floats(1.1, 8))
def test_the_more_nodes_are_lost_the_more_often_a_checkpoint_is_written(losses: float, more: float) -> None:
    case = PlanCase(pipelines=2, stages=4, micro_batches=8)
    seldom, often = (
        best_checkpoint_interval_s(
            GoodputInputs(
                case=case,
                failure_free_step_s=1.0,
                nodes=8,
                state_bytes=1e6,
                risk=PreemptionRisk(preemption_rate=rate),
            )
        )
        for rate in (losses, losses * more)
    )
    assert often <= seldom


def test_strategies_that_restart_from_checkpoints_write_at_least_ten(tmp_path: Path) -> None:
    long = job(layers=[linear] * 6, steps=200)
    for strategy in ("checkpoint", "migrate"):
        setup = prepare_run(long, RunConfig(stages=2, strategy=strategy, out=str(tmp_path)))
        assert 1 <= setup.checkpoint_every <= 20
        assert f"a checkpoint every {setup.checkpoint_every} steps" in setup.reason
    assert (
        prepare_run(long, RunConfig(stages=2, strategy="checkpoint", out="x", checkpoint_every=7)).checkpoint_every == 7
    )


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"strategy": "reroute", "stages": 2}, "needs peers, and there is 1 pipeline: use --pipelines 2, or shadow"),
        ({"strategy": "drop", "stages": 2}, "needs a pipeline that goes on, and there is 1: use --pipelines 2"),
        ({"strategy": "shadow", "pipelines": 2}, "needs a predecessor, and there is 1 stage: use --stages 2"),
        ({"strategy": "shadow-lazy"}, "needs a predecessor, and there is 1 stage: use --stages 2, or reroute"),
        ({"strategy": "checkpoint", "stages": 2}, "needs a folder for its checkpoints: add --out"),
        ({"strategy": "migrate", "stages": 2}, "needs a folder for its checkpoints: add --out"),
        (
            {"strategy": "checkpoint", "out": "x"},
            "needs a node that goes on after a loss, and there is 1: use --nodes 2",
        ),
        ({"strategy": "checkpiont"}, "no --strategy 'checkpiont': did you mean checkpoint?"),
        ({"restart": "hot"}, "no --restart 'hot': use warm or cold"),
        ({"replace_within": -1.0}, "--replace-within is -1: use a number of seconds, 0 or more"),
        ({"replace_within": float("nan")}, "--replace-within is nan"),
        ({"preemption_rate": -0.1}, "--preemption-rate is -0.1: use the share of nodes preempted per hour"),
    ],
)
def test_impossible_requests_are_refused_in_one_sentence(request_: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        prepare_run(JOB, RunConfig(**request_))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fewer_nodes_than_the_model_needs_are_refused_with_how_many_it_needs() -> None:
    with pytest.raises(PlanError, match=r"too little for any shape on 1 node: .* would fit; use --nodes [2-6]"):
        prepare_run(JOB, RunConfig(nodes=1, memory=1000))


def test_a_run_says_what_each_stage_needs_and_is_refused_if_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = prepare_run(JOB, RunConfig(pipelines=2, stages=3, strategy="shadow"))
    assert [memory.stage for memory in setup.worker_memories] == [0, 1, 2]
    need = max(memory.total for memory in setup.worker_memories)
    request: dict[str, Any] = {"pipelines": 2, "stages": 3, "strategy": "shadow", "cuts": (2, 4)}
    prepare_run(JOB, RunConfig(memory=need, **request))
    with pytest.raises(PlanError, match=r"^stage \d needs .* under shadow .* and --memory has .*: use .*--stages"):
        prepare_run(JOB, RunConfig(memory=need - 1, **request))


def test_a_run_on_a_gpu_is_refused_if_the_gpu_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_run_module, "select_device", lambda job: torch.device("cuda"))
    monkeypatch.setattr(prepare_run_module, "usable_device_bytes", lambda device: 100)
    monkeypatch.setattr(prepare_run_module, "fingerprint", lambda job: "a GPU")
    with pytest.raises(PlanError, match=r"^stage 0 needs .* and the GPU \(92% of its memory\) has 100 bytes"):
        prepare_run(JOB, RunConfig(pipelines=1, stages=1))


def test_nodes_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    available = 1 << 40
    monkeypatch.setattr(prepare_run_module, "select_device", lambda job: torch.device("cuda"))
    monkeypatch.setattr(prepare_run_module, "usable_device_bytes", lambda device: available)
    monkeypatch.setattr(prepare_run_module, "fingerprint", lambda job: "a GPU")
    monkeypatch.setattr(prepare_run_module, "chooses_kernels", lambda device: False)
    needs = [memory.total for memory in prepare_run(JOB, RunConfig(pipelines=2, stages=2)).worker_memories]
    available = 2 * sum(needs)
    prepare_run(JOB, RunConfig(pipelines=2, stages=2))
    available -= 1
    with pytest.raises(PlanError, match=r"^stage \d needs .* and each of 4 workers on a GPU has"):
        prepare_run(JOB, RunConfig(pipelines=2, stages=2))
    prepare_run(JOB, RunConfig(pipelines=2, stages=2, workers_per_node=2))  # each node with its two stages on two GPUs
