"""What to rent: within memory, nodes and budget; best first; and what losses leave of the speed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import PlanError
from culm.plan import LayerCost, PlanCase, Profile
from culm.plan.rent.rental_options import InstanceOffer, RentalQuery, find_rental_options
from culm.plan.rent.strategy_goodput import (
    GoodputInputs,
    PreemptionRisk,
    StrategyGoodput,
    slowdown_with_missing_nodes,
    step_s_on_complete_pipelines,
)
from culm.schedule import Costs
from culm.strategies.registry import by_preference, get

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
QUERY = RentalQuery(profiles={2: PROFILE}, global_batch=128, node_range=(4, 24), strategies=by_preference())
ESTIMATED = ("reroute", "shadow", "shadow-lazy", "checkpoint")
INSTANCE = InstanceOffer(instance="box", memory=8 * GB, bandwidth=1.25e9, usd_per_h=0.5, zones=3)


def test_every_choice_is_within_the_nodes_the_memory_and_the_budget() -> None:
    found = find_rental_options(replace(QUERY, budget_usd_per_h=8.0), INSTANCE)
    assert found.table
    for row in found.table:
        assert 4 <= row.nodes <= 16
        assert row.usd_per_h == row.nodes * 0.5 <= 8.0
        assert row.memory.total <= INSTANCE.memory
        assert row.case.pipelines * row.case.stages == row.nodes


def test_the_best_has_the_most_goodput_up_to_two_percent_and_the_others_follow() -> None:
    first, *others = find_rental_options(QUERY, INSTANCE).table
    assert first.goodput >= 0.98 * max(row.goodput for row in others)
    assert [row.goodput for row in others] == sorted((row.goodput for row in others), reverse=True)


def test_a_strategy_without_an_estimate_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="--strategy none gives no estimate for the shapes that fit on box"):
        find_rental_options(replace(QUERY, strategies=(get("none"),)), INSTANCE)


def test_a_shape_appears_once() -> None:
    shapes = [row.shape for row in find_rental_options(QUERY, INSTANCE).table]
    assert len(shapes) == len(set(shapes))


def test_money_is_goodput_and_price() -> None:
    row = find_rental_options(QUERY, INSTANCE).table[0]
    assert row.usd_per_million == pytest.approx(row.usd_per_h * row.mean_nodes_present / (row.goodput * 3600) * 1e6)
    assert row.mean_nodes_present == pytest.approx(1 / (1 + 0.1 * 1500 / 3600))


def test_the_reason_names_shape_price_strategy_and_what_else_there_was() -> None:
    found = find_rental_options(QUERY, INSTANCE)
    best = found.table[0]
    assert found.why.startswith(f"{best.shape} on {best.nodes} nodes of box: ")
    assert best.strategy in found.why
    assert "next is" in found.why


def test_a_given_shape_is_kept() -> None:
    table = find_rental_options(replace(QUERY, pipelines=3, stages=4), INSTANCE).table
    assert [row.shape for row in table] == ["3 x 4"]


def test_nodes_with_several_accelerators_are_paid_once() -> None:
    rows = find_rental_options(replace(QUERY, node_range=(1, 3)), replace(INSTANCE, workers=8, usd_per_h=4.0)).table
    for row in rows:
        assert row.nodes == -(-row.case.pipelines * row.case.stages // 8)
        assert row.usd_per_h == 4.0 * row.nodes


@pytest.mark.parametrize(
    ("change", "node", "sentence"),
    [
        (
            {"budget_usd_per_h": 1.0},
            INSTANCE,
            "budget is 1/h, but the cheapest shape that fits takes 2.00 $/h (4 nodes of box)",
        ),
        ({"node_range": (1, 1)}, INSTANCE, "nothing fits on 1..1 nodes: the nearest that fits is 1 x 3; use --nodes 3"),
        ({}, replace(INSTANCE, memory=GB), "layer 0 (block) alone needs 1.30 GB; use a device with more, as V100"),
        ({"stages": 13}, INSTANCE, "stages is 13: 12 layers fill at most as many; use --stages 12"),
        ({"pipelines": 100}, INSTANCE, "pipelines is 100, but a step has only 64 micro-batches: use --pipelines 64"),
        ({"pipelines": 8, "stages": 4}, INSTANCE, "nothing fits on 4..24 nodes: the nearest that fits is 8 x 4"),
        ({"stages": 1}, INSTANCE, "a pipeline of 1 stage needs more for activations in flight: use another depth"),
    ],
)
def test_an_impossible_query_is_refused_with_the_nearest_choice(
    change: dict[str, object], node: InstanceOffer, sentence: str
) -> None:
    with pytest.raises(PlanError) as error:
        find_rental_options(replace(QUERY, **change), node)  # type: ignore[arg-type]
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"node_range": (5, 4)}, "nodes is 5..4"),
        ({"node_range": (0, 4)}, "nodes is 0..4"),
        ({"budget_usd_per_h": -1.0}, "budget is -1.0/h"),
        ({"budget_usd_per_h": math.nan}, "budget is nan/h"),
        ({"global_batch": 0}, "batch is 0"),
        ({"stages": 0}, "stages is 0"),
    ],
)
def test_an_invalid_query_is_refused(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence.replace(".", r"\.")):
        replace(QUERY, **change)  # type: ignore[arg-type]


CASE = PlanCase(
    pipelines=4, stages=6, micro_batches=64, costs=Costs(forward=0.1, input=0.1, weight=0.1, step=0.05, send=0.01)
)


def estimate_goodput(
    strategy: str, case: PlanCase, step_s: float, *, nodes: int, state_bytes: float, risk: PreemptionRisk
) -> StrategyGoodput | None:
    run = GoodputInputs(case=case, failure_free_step_s=step_s, nodes=nodes, state_bytes=state_bytes, risk=risk)
    return get(strategy).estimate(run)


def goodput(strategy: str, risk: PreemptionRisk, case: PlanCase = CASE) -> float:
    found = estimate_goodput(strategy, case, 6.0, nodes=24, state_bytes=5e9, risk=risk)
    assert found is not None
    return found.useful_share / found.step_s


@pytest.mark.parametrize("strategy", ESTIMATED)
def test_more_losses_leave_less(strategy: str) -> None:
    rates = [goodput(strategy, PreemptionRisk(preemption_rate=rate)) for rate in (0.0, 0.05, 0.1, 0.3, 1.0)]
    assert rates == sorted(rates, reverse=True)


def test_without_losses_only_shadows_and_checkpoints_cost_anything() -> None:
    calm = PreemptionRisk(preemption_rate=0.0)
    assert goodput("reroute", calm) == pytest.approx(1 / 6.0, rel=1e-3)
    assert goodput("shadow-lazy", calm) < goodput("reroute", calm)
    assert goodput("shadow", calm) <= goodput("shadow-lazy", calm)


def test_re_routing_beats_checkpoints_when_nodes_are_lost() -> None:
    assert goodput("reroute", PreemptionRisk(preemption_rate=0.3)) > goodput(
        "checkpoint", PreemptionRisk(preemption_rate=0.3)
    )


def test_checkpoints_are_written_more_often_when_more_is_lost() -> None:
    every = [
        estimate_goodput(
            "checkpoint", CASE, 6.0, nodes=24, state_bytes=0.0, risk=PreemptionRisk(preemption_rate=rate)
        ).checkpoint_interval_s  # type: ignore[union-attr]
        for rate in (0.01, 0.1, 1.0)
    ]
    assert every == sorted(every, reverse=True)


def test_one_pipeline_has_no_peers_and_one_stage_no_shadow() -> None:
    alone = replace(CASE, pipelines=1)
    assert estimate_goodput("reroute", alone, 6.0, nodes=6, state_bytes=0.0, risk=PreemptionRisk()) is None
    flat = replace(CASE, stages=1)
    assert estimate_goodput("shadow", flat, 6.0, nodes=4, state_bytes=0.0, risk=PreemptionRisk()) is None


@pytest.mark.parametrize("field", ["preemption_rate", "mean_group_size", "replace_s", "storage_bandwidth"])
def test_an_invalid_risk_is_refused(field: str) -> None:
    with pytest.raises(PlanError, match=f"Risk.{field} is -1"):
        PreemptionRisk(**{field: -1.0})


@given(st.sampled_from(ESTIMATED), st.floats(0, 5), st.integers(1, 5), st.integers(1, 6), st.floats(1, 8))
def test_no_market_gives_a_share_outside_of_zero_and_one(
    strategy: str, losses: float, D: int, P: int, group: float
) -> None:
    case = PlanCase(pipelines=D, stages=P, micro_batches=4 * D)
    found = estimate_goodput(
        strategy,
        case,
        20.0,
        nodes=D * P,
        state_bytes=1e9,
        risk=PreemptionRisk(preemption_rate=losses, mean_group_size=group),
    )
    assert found is None or (0 <= found.useful_share <= 1 and found.step_s >= 20.0 * (1 - 1e-9))


@pytest.mark.parametrize("names", [("reroute",), ("shadow",), ("checkpoint",)])
def test_the_parts_of_the_memory_add_up(names: tuple[str, ...]) -> None:
    rows = find_rental_options(replace(QUERY, strategies=[get(name) for name in names]), INSTANCE).table
    for row in rows:
        assert row.memory.total <= INSTANCE.memory
        assert bool(row.memory.shadow) == (row.strategy == "shadow")
        micros, keeps = len(row.case.micros_by_pipeline[0]), get(row.strategy).keeps_outputs
        boundaries = (row.memory.stage > 0) + (row.memory.stage < row.case.stages - 1)
        assert row.memory.frames == 2 * (micros * keeps + 1) * boundaries * BLOCK.output_bytes
        held = row.memory.weights + row.memory.shadow // BLOCK.resident_bytes * BLOCK.parameter_bytes
        assert row.memory.saved_weights == keeps * (2 if row.memory.shadow else 1) * held
        assert row.memory.sums == (row.memory.saved_weights or row.memory.weights * (row.case.pipelines > 1))
        assert row.memory.on_host == row.memory.sums + row.memory.frames + row.memory.off_loaded
        assert ("in host memory" in row.memory.describe()) == bool(row.memory.on_host)


def test_a_missing_node_is_missing_with_all_its_workers_and_only_while_it_is_missing() -> None:
    """Two nodes of eight workers, 4 x 4, no bubble: while one is missing, four hours in a hundred, speed is half."""
    case = PlanCase(pipelines=4, stages=4, micro_batches=400, costs=Costs(forward=1.0, input=1.0, weight=1.0))
    risk = PreemptionRisk(preemption_rate=0.1, replace_s=3600 / 0.1 / 24)
    run = GoodputInputs(case=case, failure_free_step_s=300.0, nodes=2, state_bytes=0.0, risk=risk)
    assert risk.mean_missing_nodes(2) == pytest.approx(2 * 0.04)
    expected = 1 / (0.92 + 0.08 / 2)
    assert slowdown_with_missing_nodes(run) == pytest.approx(expected, rel=0.01)
    assert step_s_on_complete_pipelines(run, 1.0) == pytest.approx(expected, rel=0.01)


def test_a_large_model_on_many_gpus_makes_progress_with_preemptions() -> None:
    """Losses of a node with eight workers are recovered by the peers of its stages at the same time."""
    case = PlanCase(pipelines=2, stages=128, micro_batches=1024, costs=Costs(forward=0.2, input=0.2, weight=0.2))
    run = GoodputInputs(
        case=case, failure_free_step_s=400.0, nodes=32, state_bytes=4.9e12, risk=PreemptionRisk(preemption_rate=0.1)
    )
    found = get("reroute").estimate(run)
    assert found is not None
    assert found.useful_share > 0.8
    assert found.checkpoint_interval_s < 3600
