"""What to rent: within memory, nodes and budget; best first; and what losses leave of the speed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan import Case, LayerCost, Profile
from culm.plan.goodput import STRATEGIES, Risk, held
from culm.plan.offers import Offer, Wish, offers
from culm.schedule import Costs

GB = 10**9
BLOCK = LayerCost(
    name="block",
    forward_s=0.01,
    input_s=0.01,
    weight_s=0.01,
    parameter_bytes=GB // 4,
    state_bytes=3 * GB // 4,
    activation_bytes=GB // 20,
    output_bytes=10**6,
)
PROFILE = Profile(layers=(BLOCK,) * 12, device="test", micro_batch=2, threads=1, source="estimated")
WISH = Wish(profiles={2: PROFILE}, batch=128, nodes=(4, 24))
NODE = Offer(instance="box", memory=8 * GB, bandwidth=1.25e9, usd_h=0.5, zones=3)


def test_every_choice_is_within_the_nodes_the_memory_and_the_budget() -> None:
    found = offers(replace(WISH, budget=8.0), NODE)
    assert found.table
    for row in found.table:
        assert 4 <= row.nodes <= 16
        assert row.usd_h == row.nodes * 0.5 <= 8.0
        assert row.memory <= NODE.memory
        assert row.case.pipelines * row.case.stages == row.nodes


def test_the_best_has_the_most_goodput_up_to_two_percent_and_the_others_follow() -> None:
    first, *others = offers(WISH, NODE).table
    assert first.goodput >= 0.98 * max(row.goodput for row in others)
    assert [row.goodput for row in others] == sorted((row.goodput for row in others), reverse=True)


def test_a_shape_appears_once() -> None:
    shapes = [row.shape for row in offers(WISH, NODE).table]
    assert len(shapes) == len(set(shapes))


def test_money_is_goodput_and_price() -> None:
    row = offers(WISH, NODE).table[0]
    assert row.usd_per_million == pytest.approx(row.usd_h * row.present / (row.goodput * 3600) * 1e6)
    assert row.present == pytest.approx(1 - 0.1 * 1500 / 3600)


def test_the_reason_names_shape_price_strategy_and_what_else_there_was() -> None:
    found = offers(WISH, NODE)
    best = found.table[0]
    assert found.why.startswith(f"{best.shape} on {best.nodes} nodes of box: ")
    assert best.strategy in found.why
    assert "next is" in found.why


def test_a_given_shape_is_kept() -> None:
    table = offers(replace(WISH, pipelines=3, stages=4), NODE).table
    assert [row.shape for row in table] == ["3 x 4"]


def test_nodes_with_several_accelerators_are_paid_once() -> None:
    rows = offers(replace(WISH, nodes=(1, 3)), replace(NODE, workers=8, usd_h=4.0)).table
    for row in rows:
        assert row.nodes == -(-row.case.pipelines * row.case.stages // 8)
        assert row.usd_h == 4.0 * row.nodes


@pytest.mark.parametrize(
    ("change", "node", "sentence"),
    [
        ({"budget": 1.0}, NODE, "budget is 1/h, but the cheapest shape that fits takes 2.00 $/h (4 nodes of box)"),
        ({"nodes": (1, 1)}, NODE, "nothing fits on 1..1 nodes: the nearest that fits is 1 x 2; use --nodes 2"),
        ({}, replace(NODE, memory=GB), "layer 0 (block) alone needs 1.05 GB; use a device with more, as V100"),
        ({"stages": 13}, NODE, "stages is 13: 12 layers fill at most as many; use --stages 12"),
        ({"pipelines": 100}, NODE, "pipelines is 100, but a step has only 64 micro-batches: use --pipelines 64"),
        ({"pipelines": 8, "stages": 4}, NODE, "nothing fits on 4..24 nodes: the nearest that fits is 8 x 4"),
        ({"stages": 1}, NODE, "a pipeline of 1 stage needs more for activations in flight: use another depth"),
    ],
)
def test_what_can_not_be_had_is_refused_with_the_nearest_that_can(
    change: dict[str, object], node: Offer, sentence: str
) -> None:
    with pytest.raises(PlanError) as error:
        offers(replace(WISH, **change), node)  # type: ignore[arg-type]
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"nodes": (5, 4)}, "nodes is 5..4"),
        ({"nodes": (0, 4)}, "nodes is 0..4"),
        ({"budget": -1.0}, "budget is -1.0/h"),
        ({"budget": math.nan}, "budget is nan/h"),
        ({"batch": 0}, "batch is 0"),
        ({"stages": 0}, "stages is 0"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence.replace(".", r"\.")):
        replace(WISH, **change)  # type: ignore[arg-type]


CASE = Case(
    pipelines=4, stages=6, micro_batches=64, costs=Costs(forward=0.1, input=0.1, weight=0.1, step=0.05, send=0.01)
)


def goodput(strategy: str, risk: Risk, case: Case = CASE) -> float:
    found = held(strategy, case, 6.0, nodes=24, state_bytes=5e9, risk=risk)
    assert found is not None
    return found.share / found.step_s


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_losses_leave_less(strategy: str) -> None:
    rates = [goodput(strategy, Risk(losses=rate)) for rate in (0.0, 0.05, 0.1, 0.3, 1.0)]
    assert rates == sorted(rates, reverse=True)


def test_without_losses_only_shadows_and_checkpoints_cost_anything() -> None:
    calm = Risk(losses=0.0)
    assert goodput("reroute", calm) == pytest.approx(1 / 6.0, rel=1e-3)
    assert goodput("shadow-lazy", calm) < goodput("reroute", calm)
    assert goodput("shadow", calm) <= goodput("shadow-lazy", calm)


def test_re_routing_beats_checkpoints_when_nodes_are_lost() -> None:
    assert goodput("reroute", Risk(losses=0.3)) > goodput("checkpoint", Risk(losses=0.3))


def test_checkpoints_are_written_more_often_when_more_is_lost() -> None:
    every = [
        held("checkpoint", CASE, 6.0, nodes=24, state_bytes=0.0, risk=Risk(losses=rate)).checkpoint_s  # type: ignore[union-attr]
        for rate in (0.01, 0.1, 1.0)
    ]
    assert every == sorted(every, reverse=True)


def test_one_pipeline_has_no_peers_and_one_stage_no_shadow() -> None:
    alone = replace(CASE, pipelines=1)
    assert held("reroute", alone, 6.0, nodes=6, state_bytes=0.0, risk=Risk()) is None
    flat = replace(CASE, stages=1)
    assert held("shadow", flat, 6.0, nodes=4, state_bytes=0.0, risk=Risk()) is None


@pytest.mark.parametrize("field", ["losses", "group", "replace_s", "storage"])
def test_a_risk_that_makes_no_sense_is_refused(field: str) -> None:
    with pytest.raises(PlanError, match=f"Risk.{field} is -1"):
        Risk(**{field: -1.0})


@given(st.sampled_from(STRATEGIES), st.floats(0, 5), st.integers(1, 5), st.integers(1, 6), st.floats(1, 8))
def test_no_market_gives_a_share_outside_of_zero_and_one(
    strategy: str, losses: float, D: int, P: int, group: float
) -> None:
    case = Case(pipelines=D, stages=P, micro_batches=4 * D)
    found = held(strategy, case, 20.0, nodes=D * P, state_bytes=1e9, risk=Risk(losses=losses, group=group))
    assert found is None or (0 <= found.share <= 1 and found.step_s >= 20.0 * (1 - 1e-9))
