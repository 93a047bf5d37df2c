"""`auto` and what is refused: a choice by cost, with its reason; what can not work is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.cluster.prepare import Request, prepare
from culm.errors import PlanError, UsageError
from culm.plan import Case
from culm.plan.goodput import Risk
from culm.plan.strategy import choose_strategy, interval
from culm.testing import Faults, reference, simulate

from .jobs import job, linear

JOB = job(layers=[linear] * 6, steps=6, exact=True)


def settled(**request: Any) -> tuple[str, str]:
    """The strategy of a run, and why."""
    setup = prepare(JOB, Request(**request))
    return setup.strategy, setup.why


@pytest.mark.parametrize(
    ("shape", "strategy", "why"),
    [
        ({"pipelines": 2, "stages": 3}, "reroute", "peers hold every layer"),
        ({"pipelines": 4}, "reroute", "peers hold every layer"),
        ({"stages": 3}, "shadow", "with one pipeline nobody else would hold a lost node's layers"),
        ({}, "none", "on one node there is nobody to go on"),
    ],
    ids=["2x3", "4x1", "1x3", "1x1"],
)
def test_auto_takes_peers_first_and_shadows_where_a_layer_would_have_one_holder(
    shape: dict[str, int], strategy: str, why: str
) -> None:
    chosen, reason = settled(**shape)
    assert chosen == strategy
    assert why in reason


def test_the_reason_has_the_estimates_of_all_that_was_compared(tmp_path: Path) -> None:
    _, why = settled(pipelines=2, stages=3, out=str(tmp_path), losses=0.2)
    for part in ("of an undisturbed run by estimate at 20% of the nodes lost an hour", "(shadow ", "checkpoint "):
        assert part in why


def test_without_a_folder_it_says_that_there_is_nothing_to_fall_back_on() -> None:
    assert "without --out there is no checkpoint" in settled(pipelines=2, stages=3)[1]


@pytest.mark.parametrize("shape", [{"pipelines": 2, "stages": 3}, {"pipelines": 1, "stages": 3}, {"pipelines": 4}])
def test_what_auto_chose_survives_a_loss(tmp_path: Path, shape: dict[str, Any]) -> None:
    faults = Faults().kill(1, step=3, nth=2)
    run = simulate(JOB, faults=faults, latency=0.001, cost=lambda *_: 0.01, out=str(tmp_path), **shape)
    assert run.state_sha256 == reference(JOB).state_sha256
    (started,) = [e for e in map(json.loads, (tmp_path / "events.jsonl").open()) if e["kind"] == "run_started"]
    assert f"strategy {run.summary['strategy']}: " in started["why"]


CASES = st.builds(
    Case,
    pipelines=st.integers(1, 4),
    stages=st.integers(1, 5),
    micro_batches=st.integers(4, 12),
    stagger=st.booleans(),
)
RISKS = st.builds(Risk, losses=st.floats(0, 2), group=st.floats(1, 6), stall_s=st.floats(0.1, 5))


@given(CASES, st.floats(0.01, 100), RISKS, st.booleans())
def test_a_choice_can_be_used_in_its_shape_and_is_near_the_best(
    case: Case, step_s: float, risk: Risk, saves: bool
) -> None:
    chosen = choose_strategy(case, step_s, state_bytes=1e9, risk=risk, saves=saves)
    nodes = case.pipelines * case.stages
    assert (chosen.strategy == "none") == (nodes == 1)
    assert chosen.strategy != "reroute" or case.pipelines > 1
    assert chosen.strategy != "shadow" or case.stages > 1
    assert chosen.strategy != "checkpoint" or saves
    assert chosen.why.startswith(f"strategy {chosen.strategy}: ")
    assert (chosen.checkpoint_s is not None) == (saves and nodes > 1)


@given(st.floats(0.01, 2), st.floats(1.1, 8))
def test_the_more_nodes_are_lost_the_more_often_a_checkpoint_is_written(losses: float, more: float) -> None:
    case = Case(pipelines=2, stages=4, micro_batches=8)
    seldom, often = (
        interval(case, 1.0, state_bytes=1e6, risk=Risk(losses=rate)) for rate in (losses, losses * more)
    )  # fmt: skip
    assert often <= seldom


def test_where_every_loss_goes_back_to_one_there_are_ten_checkpoints_at_least(tmp_path: Path) -> None:
    long = job(layers=[linear] * 6, steps=200)
    for strategy in ("checkpoint", "migrate"):
        setup = prepare(long, Request(stages=2, strategy=strategy, out=str(tmp_path)))
        assert 1 <= setup.checkpoint_every <= 20
        assert f"a checkpoint every {setup.checkpoint_every} steps" in setup.why
    assert prepare(long, Request(stages=2, strategy="checkpoint", out="x", checkpoint_every=7)).checkpoint_every == 7


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"strategy": "reroute", "stages": 2}, "needs peers, and there is 1 pipeline: use --pipelines 2, or shadow"),
        ({"strategy": "drop", "stages": 2}, "needs a pipeline that goes on, and there is 1: use --pipelines 2"),
        ({"strategy": "shadow", "pipelines": 2}, "needs a predecessor, and there is 1 stage: use --stages 2"),
        ({"strategy": "shadow-lazy"}, "needs a predecessor, and there is 1 stage: use --stages 2, or reroute"),
        ({"strategy": "checkpoint", "stages": 2}, "needs a folder for its checkpoints: add --out"),
        ({"strategy": "migrate", "stages": 2}, "needs a folder for its checkpoints: add --out"),
        ({"strategy": "checkpoint", "out": "x"}, "needs somebody to go on, and there is 1 node: use --nodes 2"),
        ({"strategy": "checkpiont"}, "no --strategy 'checkpiont': did you mean checkpoint?"),
        ({"restart": "hot"}, "no --restart 'hot': use warm or cold"),
        ({"replace_within": -1.0}, "--replace-within is -1: use a number of seconds, 0 or more"),
        ({"replace_within": float("nan")}, "--replace-within is nan"),
        ({"losses": -0.1}, "--losses is -0.1: use the share of nodes lost an hour"),
    ],
)
def test_what_can_not_work_is_refused_in_one_sentence(request_: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        prepare(JOB, Request(**request_))
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_fewer_nodes_than_the_model_needs_are_refused_with_how_many_it_needs() -> None:
    with pytest.raises(PlanError, match=r"too little for any shape on 1 node: .* would fit; use --nodes [2-6]"):
        prepare(JOB, Request(nodes=1, memory=1000))
